"""Replicas on a Ray cluster of this machine, a head and two nodes: cached tokens, tokens per second, added latency.

Cached tokens: 40 conversations begin with one of three prefixes, one after the other, in an order drawn once. They
depend on how many prefixes a replica's cache holds and on how many replicas the two nodes have, so there is a scenario
for each. Random numbers stand for power of two choices: no replica is ever busier than another when a request comes.

Tokens per second: four streams of SmolLM2, one thread each side, by time and by CPU time of this process and all of its
children, which are those of Ray as well. Added latency: streams of the fake backend; the time to the first event is the
way of a frame to the replica and of one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import numpy as np
import psutil
from attrs import field, frozen
from rich.console import Console

from enginehouse.contract.engine import Placement
from enginehouse.contract.types import EngineRequest, RequestFinished, SamplingParams, Segment, StopParams, TextDelta
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery import Recovery
from enginehouse.serving import ModelManager
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.waiting import until

from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_replicas"]

_NUM_CONVERSATIONS, _NUM_PREFIXES = 40, 3
_SCENARIOS = [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]
"""Replicas on two nodes, and prefixes that the cache of each holds."""

_PREFIX_WORDS, _QUESTION_WORDS = 300, 12
_PREFIX_ROOM = 340
"""Tokens of a prefix, a question and an answer."""

_WORDS = ("river", "stone", "paper", "window", "garden", "train", "winter", "music", "letter", "market", "harbor")
_STORE_BYTES = 80 * 2**20
_PATIENCE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "200000",
    "RAY_worker_register_timeout_seconds": "200",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
}
"""Settings of Ray for a busy machine; it reads them when it is imported."""


@frozen
class _Answer:
    """What came of a request; ``first_s`` is the time to its first event."""

    num_tokens: int
    num_cached: int
    first_s: float


@frozen
class _Server:
    manager: ModelManager
    recovery: Recovery = field(factory=Recovery)

    async def ask(self, name: str, text: str, max_tokens: int) -> _Answer:
        """Send one request, greedy."""
        request = EngineRequest(
            request_id=name,
            segments=(Segment(text),),
            sampling=SamplingParams(temperature=0),
            stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
        )
        began_s, first_s, num_tokens, num_cached = time.perf_counter(), 0.0, 0, 0
        async for batch in await self.recovery.start(await self.manager.wait("m"), request):
            for event in batch:
                if isinstance(event, TextDelta):
                    first_s = first_s or time.perf_counter() - began_s
                    num_tokens += len(event.token_ids)
                elif isinstance(event, RequestFinished):
                    num_cached = event.usage.cached_tokens
        return _Answer(num_tokens, num_cached, first_s)


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    """A head and two nodes with room for two replicas each; yields their address."""
    os.environ.update(_PATIENCE)
    from ray.cluster_utils import Cluster  # Ray reads the settings now

    head = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, resources={"place": 2}, object_store_memory=_STORE_BYTES)
        yield cluster.address
    finally:
        import ray
        from ray import serve

        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()


@contextlib.asynccontextmanager
async def _serving(address: str | None, model: ModelSettings, num_replicas: int = 1) -> AsyncIterator[_Server]:
    """A server, without HTTP, of a model on the cluster, or on this machine for an address of None."""
    plugins = PluginsSettings(options={"ray": {"address": address}} if address else {})
    if address:
        placed = {"inner": model.backend, "replicas": num_replicas, "cpus": 0, "resources": {"place": 1}}
        model = ModelSettings(
            source=model.source,
            backend="ray",
            slots=model.slots,
            context=model.context,
            options={**placed, **model.options},
        )
    settings = Settings(models={"m": model}, plugins=plugins)
    manager = ModelManager(settings, PluginRegistry.for_settings(settings))
    try:
        await manager.start()
        await manager.wait_settled(300)
        if address:
            await until(lambda: len(manager.get("m").engine.members) == num_replicas, timeout_s=300)  # type: ignore[attr-defined]
        yield _Server(manager)
    finally:
        await manager.close()


def _words(generator: random.Random, number: int) -> str:
    return " ".join(generator.choices(_WORDS, k=number))


async def _cached_tokens(server: _Server, seed: int, num_conversations: int) -> int:
    """Tokens of all conversations that were cached."""
    generator = random.Random(seed)
    prefixes = [f"Part {number}. " + _words(generator, _PREFIX_WORDS) for number in range(_NUM_PREFIXES)]
    cached = 0
    for number in range(num_conversations):
        text = f"{generator.choice(prefixes)}\nQuestion {number}: {_words(generator, _QUESTION_WORDS)}?"
        cached += (await server.ask(f"c{number}", text, 2)).num_cached
    return cached


def _at_random(seed: int) -> Callable[[EngineRequest, Mapping[str, int]], Placement]:
    generator = random.Random(seed)

    def choose(request: EngineRequest, loads: Mapping[str, int]) -> Placement:
        two = generator.sample(sorted(loads), 2)
        return Placement(replica=min(two, key=loads.__getitem__), reason="load", matched=0.0)

    return choose


def _cpu_s() -> float:
    """CPU time of this process and all of its children, also those that have ended."""
    me = psutil.Process()
    times = [me.cpu_times()]
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times.append(child.cpu_times())
    return sum(one.user + one.system for one in times)


async def _prefixes(plan: Plan, console: Console, address: str, record: Record) -> None:
    num_conversations = 6 if plan.quick else _NUM_CONVERSATIONS
    for num_replicas, room in _SCENARIOS:
        options = {"threads": 1, "cache_tokens": round((room + 0.2) * _PREFIX_ROOM)}
        model = ModelSettings(source=str(plan.model_file), backend="llamacpp", context=384, slots=1, options=options)
        scenario = _scenario(num_replicas, room)
        for subject in ("prefixes", "power of two choices"):
            async with _serving(address, model, num_replicas) as server:
                if subject != "prefixes":
                    server.manager.get("m").engine.placement.choose = _at_random(1)  # type: ignore[attr-defined]
                cached = await _cached_tokens(server, 1, num_conversations)
            record.add(Key(scenario, subject, "cached tokens"), cached)
            console.print(f"{scenario}, {subject}: {cached} cached tokens")


async def _pace(plan: Plan, console: Console, address: str, record: Record) -> None:
    num_tokens = 16 if plan.quick else 128
    model = ModelSettings(source=str(plan.model_file), backend="llamacpp", slots=4, options={"threads": 1})
    async with _serving(None, model) as here, _serving(address, model) as there:
        for number, (subject, server) in plan.interleave([("local worker", here), ("one replica", there)]):
            began_s, cpu_s = time.perf_counter(), _cpu_s()
            asked = (server.ask(f"p{number}-{one}", f"Story {one}: once", num_tokens) for one in range(4))
            total = sum(answer.num_tokens for answer in await asyncio.gather(*asked))
            took_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - cpu_s
            record.add(Key("4 streams", subject, "tokens/s"), total / took_s)
            record.add(Key("4 streams", subject, "tokens per CPU second"), total / cpu_s)
            console.print(
                f"round {number + 1}, {subject}: {total / took_s:.1f} tokens/s, {total / cpu_s:.1f} per CPU s"
            )


async def _latency(plan: Plan, console: Console, address: str, record: Record) -> None:
    num_streams = 40 if plan.quick else 1000
    model = ModelSettings(source="fake", backend="fake", slots=16)
    async with _serving(None, model) as here, _serving(address, model) as there:
        for number, (subject, server) in plan.interleave([("local worker", here), ("one replica", there)]):
            first_s: list[float] = []
            for one in range(num_streams // plan.num_rounds):
                first_s.append((await server.ask(f"l{number}-{one}", f"story {one}", 64)).first_s)
            for quantile in (50, 99):
                value_ms = 1e3 * float(np.percentile(first_s, quantile))
                record.add(Key("first event", subject, f"ms, {quantile}th percentile"), value_ms)
                console.print(f"round {number + 1}, {subject}: p{quantile} {value_ms:.2f} ms")


def _scenario(num_replicas: int, room: int) -> str:
    return f"{num_replicas} replicas, {room} of {_NUM_PREFIXES} prefixes fit one"


async def _measure(plan: Plan, console: Console, address: str, record: Record) -> None:
    await _latency(plan, console, address, record)
    await _pace(plan, console, address, record)
    await _prefixes(plan, console, address, record)


def measure_replicas(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Cached tokens by routing, and a replica beside a local worker."""
    record = Record()
    with _cluster() as address:
        asyncio.run(_measure(plan, console, address, record))
    routing = [
        Comparison(
            Key(_scenario(*one), "prefixes", "cached tokens"),
            Key(_scenario(*one), "power of two choices", "cached tokens"),
        )
        for one in _SCENARIOS
    ]
    pace = [
        Comparison(Key("4 streams", "one replica", metric), Key("4 streams", "local worker", metric), 0.95)
        for metric in ("tokens/s", "tokens per CPU second")
    ]
    latency = [
        Comparison(Key("first event", "one replica", metric), Key("first event", "local worker", metric))
        for metric in ("ms, 50th percentile", "ms, 99th percentile")
    ]
    return record, [*routing, *pace, *latency]
