"""The soak test: many clients with every kind of request for a long time; then everything must be as it was.

Memory may not grow by more than 5 % after a warm-up; slots, threads and files must be those of before; the access log
must hold one line with a right outcome for each request; metrics and log must agree.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from attrs import define, field, frozen
from rich.console import Console

from enginehouse_testkit.server import ServerProcess, started_server

from .soak_requests import KINDS, Client, SoakFailed, long_prompt

__all__ = ["SoakResult", "soak"]

_CONFIG = """
[server]
log_format = "json"

[auth]
keys = [
  { name = "clients", key = "clients-of-the-soak-test" },
  { name = "operator", key = "operator-of-the-soak-test", scopes = ["infer", "metrics", "admin"] },
]

[models.starter]
source = "starter"
context = 2048
cache_tokens = 4096
slots = 8
"""
_CLIENT_KEY, _ADMIN_KEY = "clients-of-the-soak-test", "operator-of-the-soak-test"
_MOST_GROWTH = 1.05
_WARM_UP_SHARE = 0.25
_SETTLE_S = 20.0
_TIMEOUT_S = 300.0
_MOST_FILLING = 20
_POOL_THREADS = (os.cpu_count() or 1) + 4  # of asyncio's own pool, which starts them when they are first needed
_UNCOUNTED = ("/health", "/metrics")


@frozen
class Footprint:
    """What a process holds."""

    rss_bytes: int
    num_files: int
    num_threads: int


@define
class SoakResult:
    """What came of it.

    Attributes:
        problems: what was not as it must be; empty when the server passed.
        figures: what was measured, by name.
    """

    problems: list[str] = field(factory=list)
    figures: dict[str, Any] = field(factory=dict)


def soak(duration_s: float, console: Console, *, num_clients: int = 16, seed: int = 1, folder: Path) -> SoakResult:
    """Run it against a server of its own. ``folder`` gets the server's configuration and its log."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "soak.toml"
    config.write_text(_CONFIG, encoding="utf-8")
    with started_server("--config", config) as server:
        run = _Run(server, duration_s, num_clients, seed, console)
        asyncio.run(run.all())
        (folder / "soak-server.log").write_text(server.output, encoding="utf-8")
    return run.result


class _Run:
    def __init__(self, server: ServerProcess, duration_s: float, num_clients: int, seed: int, console: Console) -> None:
        self.result = SoakResult()
        self._server = server
        self._duration_s = duration_s
        self._num_clients = num_clients
        self._seed = seed
        self._console = console
        self._processes = _processes(server.process.pid)
        self._expected: dict[str, frozenset[str]] = {}
        self._kinds: Counter[str] = Counter()
        self._samples: dict[str, list[tuple[float, int]]] = {name: [] for name in self._processes}

    async def all(self) -> None:
        """Everything in order."""
        limits = httpx.Limits(max_keepalive_connections=self._num_clients)
        async with httpx.AsyncClient(base_url=self._server.url or "", timeout=_TIMEOUT_S, limits=limits) as http:
            await self._ask_once_of_each_kind(http)
        before = await self._settled()
        async with httpx.AsyncClient(base_url=self._server.url or "", timeout=_TIMEOUT_S, limits=limits) as http:
            await self._load(http)
        after = await self._settled()
        self._compare(before, after)
        self._judge_memory()
        async with httpx.AsyncClient(base_url=self._server.url or "", timeout=_TIMEOUT_S) as http:
            await self._check_slots(http)
            await self._check_books(http)
        self.result.figures |= {"requests": len(self._expected), "by kind": dict(self._kinds)}

    # -- load --------------------------------------------------------------------------------------

    async def _ask_once_of_each_kind(self, http: httpx.AsyncClient) -> None:
        """So that everything that is made on first use has been made."""
        client = Client(http, _CLIENT_KEY, _ADMIN_KEY, random.Random(self._seed))
        for kind, _ in KINDS:
            await self._ask(client, kind, f"soak-first-{kind.__name__}")
        # The memory of a KV position counts only when it is first used, so all must have been.
        for number in range(_MOST_FILLING):
            await self._ask(client, long_prompt, f"soak-fill-{number}")
            (model,) = (await http.get("/admin/slots", headers=_admin())).json()["data"]
            if model["free_tokens"] < 0.1 * model["cache_tokens"]:
                return
        self._problem("the KV cache does not fill")

    async def _load(self, http: httpx.AsyncClient) -> None:
        end_s = time.monotonic() + self._duration_s
        sampling = asyncio.create_task(self._sample(end_s))
        await asyncio.gather(*(self._client(http, number, end_s) for number in range(self._num_clients)))
        await sampling

    async def _client(self, http: httpx.AsyncClient, number: int, end_s: float) -> None:
        client = Client(http, _CLIENT_KEY, _ADMIN_KEY, random.Random(f"{self._seed} {number}"))
        kinds, weights = zip(*KINDS, strict=True)
        count = 0
        while time.monotonic() < end_s:
            (kind,) = client.random.choices(kinds, weights)
            await self._ask(client, kind, f"soak-{number}-{count}")
            count += 1

    async def _ask(self, client: Client, kind: Any, request_id: str) -> None:
        self._kinds[kind.__name__] += 1
        self._expected[request_id] = frozenset()  # whatever happens, it was sent
        try:
            self._expected[request_id] = await kind(client, request_id)
        except (SoakFailed, httpx.HTTPError, KeyError, ValueError) as error:
            self._problem(f"{request_id} ({kind.__name__}): {type(error).__name__}: {error}")

    async def _sample(self, end_s: float) -> None:
        began_s = time.monotonic()
        told_s = began_s
        while (now_s := time.monotonic()) < end_s:
            for name, process in self._processes.items():
                self._samples[name].append((now_s - began_s, process.memory_info().rss))
            if now_s - told_s >= 60:
                told_s = now_s
                minutes = (now_s - began_s) / 60
                self._console.print(f"{minutes:.0f} min: {len(self._expected)} requests, {self._sizes()}")
            await asyncio.sleep(min(5.0, self._duration_s / 100))

    def _sizes(self) -> str:
        return ", ".join(f"{name} {rows[-1][1] / 2**20:.0f} MiB" for name, rows in self._samples.items() if rows)

    # -- what is left ------------------------------------------------------------------------------

    async def _settled(self) -> dict[str, Footprint]:
        """What the processes hold when nothing is going on: the least of a few looks."""
        await asyncio.sleep(min(2.0, self._duration_s / 10))
        deadline_s = time.monotonic() + _SETTLE_S
        last = {name: _footprint(process) for name, process in self._processes.items()}
        while time.monotonic() < deadline_s:
            await asyncio.sleep(0.5)
            now = {name: _footprint(process) for name, process in self._processes.items()}
            if all((now[name].num_files, now[name].num_threads) == _held(last[name]) for name in now):
                return now
            last = now
        return last

    def _compare(self, before: dict[str, Footprint], after: dict[str, Footprint]) -> None:
        for name, held in after.items():
            self.result.figures[f"{name}: files, threads"] = [_held(before[name]), _held(held)]
            for what, was, is_now in zip(("files", "threads"), _held(before[name]), _held(held), strict=True):
                if is_now > was + (_POOL_THREADS if what == "threads" else 0):
                    self._problem(f"the {name} holds {is_now} {what} instead of {was}")

    def _judge_memory(self) -> None:
        """The last third after the warm-up against the first."""
        for name, rows in self._samples.items():
            warm = [size for at_s, size in rows if at_s >= _WARM_UP_SHARE * self._duration_s]
            third = max(1, len(warm) // 3)
            first, last = statistics.median(warm[:third]), statistics.median(warm[-third:])
            self.result.figures[f"{name}: MiB after warm-up, at the end"] = [round(first / 2**20), round(last / 2**20)]
            if last > _MOST_GROWTH * first:
                self._problem(f"the memory of the {name} grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")

    async def _check_slots(self, http: httpx.AsyncClient) -> None:
        (model,) = (await http.get("/admin/slots", headers=_admin())).json()["data"]
        running = (await http.get("/admin/requests", headers=_admin())).json()["data"]
        if model["slots_in_use"] or model["requests_waiting"] or model["sequences"] or running:
            self._problem(f"something still runs: {model['sequences']}, {running}")
        figures = _read_metrics((await http.get("/metrics", headers=_admin())).text)

        def figure(name: str) -> float:
            return figures[f'enginehouse_{name}{{model="starter"}}']

        taken = figure("kv_cache_tokens") - figure("kv_cache_free_tokens")
        # Sequences that computed one beginning at the same time hold it twice, and the prefix cache counts it once.
        cached, held = figure("prefix_cache_tokens"), sum(entry["tokens"] for entry in model["prefixes"])
        self.result.figures["KV positions taken, cached tokens, tokens of cached sequences"] = [taken, cached, held]
        if not cached <= taken <= held:
            self._problem(f"{taken:.0f} KV positions are taken, but cached sequences hold {cached:.0f} to {held}")
        if figure("worker_restarts_total"):
            self._problem("the worker died")

    # -- books -------------------------------------------------------------------------------------

    async def _check_books(self, http: httpx.AsyncClient) -> None:
        """One line per request, with an outcome that it may have; and the metrics say the same."""
        lines = await self._log_lines()
        metrics = _read_metrics((await http.get("/metrics", headers=_admin())).text)
        ours = Counter(line["id"] for line in lines if line["id"].startswith("soak-"))
        for request_id in self._expected:
            if ours[request_id] != 1:
                self._problem(f"{request_id} has {ours[request_id]} lines in the log")
        for line in lines:
            allowed = self._expected.get(line["id"], frozenset())
            if allowed and not set(line["outcome"].split(",")) <= allowed:
                self._problem(f"{line['id']} ended with {line['outcome']!r} instead of one of {sorted(allowed)}")
        logged = Counter(line["outcome"] for line in lines if line["path"] not in _UNCOUNTED)
        counted = _outcomes(metrics)
        self.result.figures["outcomes"] = dict(logged)
        if logged != counted:
            self._problem(f"log {dict(logged - counted)} and metrics {dict(counted - logged)} differ")
        tokens = sum(line.get("completion_tokens", 0) for line in lines)
        told = metrics.get('enginehouse_completion_tokens_total{model="starter"}', 0)
        self.result.figures["completion tokens"] = tokens
        if tokens != told:
            self._problem(f"the log has {tokens} completion tokens, the metrics {told:.0f}")

    async def _log_lines(self) -> list[dict[str, Any]]:
        """The access log, once it is complete: a line may be written after its answer."""
        deadline_s = time.monotonic() + 10
        while True:
            lines = list(_access_lines(self._server.lines))
            num_ours = sum(line["id"].startswith("soak-") for line in lines)
            if num_ours >= len(self._expected) or time.monotonic() > deadline_s:
                return lines
            await asyncio.sleep(0.2)

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)
        if len(self.result.problems) <= 50:
            self._console.print(text, markup=False)


def _admin() -> dict[str, str]:
    return {"authorization": f"Bearer {_ADMIN_KEY}"}


def _processes(pid: int) -> dict[str, psutil.Process]:
    """The server and its children: the worker is the one that has loaded a model, so the largest."""
    server = psutil.Process(pid)
    children = sorted(server.children(recursive=True), key=lambda child: -child.memory_info().rss)
    return {"server": server, "worker": children[0]}


def _footprint(process: psutil.Process) -> Footprint:
    return Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())


def _held(footprint: Footprint) -> tuple[int, int]:
    return footprint.num_files, footprint.num_threads


def _access_lines(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The fields of each line of the access log."""
    for line in tuple(lines):
        if line.startswith("{") and '"enginehouse.access"' in line:
            yield json.loads(line)["request"]


def _read_metrics(text: str) -> dict[str, float]:
    """Every figure by its name with labels."""
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def _outcomes(metrics: dict[str, float]) -> Counter[str]:
    """Requests by outcome, but for those that the log or the figures themselves leave out."""
    counted: Counter[str] = Counter()
    for name, value in metrics.items():
        is_uncounted = any(f'endpoint="{path}"' in name for path in _UNCOUNTED)
        if name.startswith("enginehouse_requests_total{") and not is_uncounted:
            found = re.search(r'outcome="([^"]*)"', name)
            counted[found[1] if found else ""] += int(value)
    return counted
