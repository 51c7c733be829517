"""A server that is asked for four times what it can do: what it does, how fast it refuses, how long the others wait.

First a closed loop finds what the server sustains; then requests come at four times that rate, whatever becomes of the
earlier ones (an open loop), as from clients that do not know of each other.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from attrs import define, field, frozen
from rich.console import Console

from .load import Load, find_model, request_body
from .peers import running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_overload"]

_FACTOR = 4
_SLOTS = 8
_CLIENTS = 2 * _SLOTS  # every slot is busy, and its successor waits
_QUEUE_TIMEOUT_S = 8.0
_FIRST_TOKEN_S = 10.0
_REFUSAL_S = 0.1
_QUICK_S = 20.0
_PEAK_SHARE = 0.5  # of the overload's duration, in which the peak is measured
_WARM_UP_SHARE = 0.15  # of each phase, which does not count
_MAX_TOKENS = 64


@frozen
class LimitedEnginehouse:
    """Ours with bounds on waiting, as a server that may be overloaded should have them."""

    model_file: Path
    name: str = "enginehouse"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`bench.peers.Peer`."""
        config = folder / "overload.toml"
        config.write_text(
            f'[models.bench]\nsource = "{self.model_file}"\nslots = {_SLOTS}\n'
            f"[limits]\nqueue_timeout_s = {_QUEUE_TIMEOUT_S}\nfirst_token_timeout_s = {_FIRST_TOKEN_S}\n"
        )
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


@define
class _Phase:
    """What came back, with times since the phase began."""

    token_times_s: list[float] = field(factory=list)
    first_s: list[float] = field(factory=list)
    refusals_s: list[float] = field(factory=list)
    outcomes: Counter[str] = field(factory=Counter)

    def rate(self, times_s: Sequence[float], seconds: float) -> float:
        """Events per second between the warm-up and the end of the phase."""
        start = _WARM_UP_SHARE * seconds
        return sum(start <= moment < seconds for moment in times_s) / (seconds - start)


def measure_overload(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Throughput over its peak, refusals, and time to first token of the admitted, at 4x what the server sustains."""
    peer, record = LimitedEnginehouse(plan.model_file), Record()
    seconds = min(plan.seconds, _QUICK_S) if plan.quick else plan.seconds
    for round_number in range(plan.num_rounds):
        with running(peer, plan.folder / "logs") as server:
            peak, overload, load_rps = asyncio.run(_measure(server.url, seconds, f"overload {round_number}"))
        peak_s = seconds * _PEAK_SHARE
        _add(
            record, peer.name, "sustained", {"tokens/s": peak.rate(peak.token_times_s, peak_s), "requests/s": load_rps}
        )
        _add(
            record,
            peer.name,
            f"{_FACTOR}x",
            {
                "tokens/s": overload.rate(overload.token_times_s, seconds),
                "refusal p95, s": _percentile(overload.refusals_s),
                "first token p95, s": _percentile(overload.first_s),
                "failed after admission": _failed(overload),
            },
        )
        console.print(f"round {round_number + 1}/{plan.num_rounds}: {load_rps:.2f} requests/s sustained;", end=" ")
        console.print(", ".join(f"{count} {name}" for name, count in sorted(overload.outcomes.items())), markup=False)
    return record, _comparisons(peer.name)


def _comparisons(name: str) -> list[Comparison]:
    over = f"{_FACTOR}x"
    return [
        Comparison(Key(over, name, "tokens/s"), Key("sustained", name, "tokens/s"), 0.95),
        Comparison(Key(over, name, "refusal p95, s"), None, _REFUSAL_S, target_is_upper=True),
        Comparison(Key(over, name, "first token p95, s"), None, _FIRST_TOKEN_S, target_is_upper=True),
    ]


def _add(record: Record, subject: str, scenario: str, values: dict[str, float]) -> None:
    for metric, value in values.items():
        record.add(Key(scenario, subject, metric), value)


def _failed(phase: _Phase) -> float:
    return float(sum(count for name, count in phase.outcomes.items() if name.startswith("failed")))


def _percentile(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else float("nan")


async def _measure(url: str, seconds: float, salt: str) -> tuple[_Phase, _Phase, float]:
    """The phase at the peak, the phase of overload, and the sustained requests per second."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = await find_model(session, url)
        load = Load(_CLIENTS, 0, max_tokens=_MAX_TOKENS)

        def ask(phase: _Phase, began: float, number: int) -> Awaitable[float]:
            return _ask(session, url, request_body(model, load, salt, number), phase, began)

        peak = await _closed_loop(ask, seconds * _PEAK_SHARE)
        # Every answer has the same length; whole answers may be few in a short phase.
        requests_per_s = max(peak.rate(peak.token_times_s, seconds * _PEAK_SHARE), 1.0) / _MAX_TOKENS
        overload = await _open_loop(ask, _FACTOR * requests_per_s, seconds)
    return peak, overload, requests_per_s


_Ask = Callable[[_Phase, float, int], Awaitable[float]]
"""Asks once; seconds after which a refused client may ask again, as the server says, else 0."""


async def _closed_loop(ask: _Ask, seconds: float) -> _Phase:
    """As many clients as keep every slot busy, each with its next request when the last one is answered."""
    phase, began, numbers = _Phase(), time.perf_counter(), iter(range(1_000_000))

    async def client() -> None:
        for number in numbers:
            await asyncio.sleep(await ask(phase, began, number))

    await _run_for([client() for _ in range(_CLIENTS)], seconds)
    return phase


async def _open_loop(ask: _Ask, per_s: float, seconds: float) -> _Phase:
    """Requests at random moments, ``per_s`` on average, whatever becomes of those before them."""
    phase, began, chance = _Phase(), time.perf_counter(), random.Random(0)
    tasks: list[asyncio.Future[float]] = []
    async for number in _arrivals(chance, per_s, began + seconds):
        tasks.append(asyncio.ensure_future(ask(phase, began, 1_000_000 + number)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return phase


async def _arrivals(chance: random.Random, per_s: float, until: float) -> AsyncIterator[int]:
    number, moment = 0, time.perf_counter()
    while (moment := moment + chance.expovariate(per_s)) < until:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        yield number
        number += 1
    await asyncio.sleep(max(0.0, until - time.perf_counter()))


async def _run_for(work: Sequence[Awaitable[None]], seconds: float) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, phase: _Phase, began: float) -> float:
    """Send one request and note what becomes of it."""
    sent = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        if response.status != 200:
            code = msgspec.json.decode(await response.read())["error"]["code"]
            phase.refusals_s.append(time.perf_counter() - sent)
            phase.outcomes[f"refused ({response.status} {code})"] += 1
            return float(response.headers.get("Retry-After", 1))
        has_text = False
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if "error" in chunk:
                phase.outcomes[f"failed ({chunk['error']['code']})"] += 1
                return 0.0
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                now = time.perf_counter()
                phase.token_times_s.append(now - began)
                if not has_text:
                    phase.first_s.append(now - sent)
                has_text = True
        phase.outcomes["served"] += 1
        return 0.0
