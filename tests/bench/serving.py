"""Whole servers under load: side by side, beside a busy neighbour, and ours by isolation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from attrs import evolve, frozen
from rich.console import Console

from .load import Load, LoadResult, drive
from .neighbour import busy_neighbour
from .peers import Enginehouse, LlamaCppServer, LlamaServer, Peer, RunningPeer, running
from .plan import Plan
from .raw_decoder import extra_buffers_work
from .record import Comparison, Key, Record

__all__ = ["measure_isolation", "measure_neighbour", "measure_serving"]

_THROUGHPUT = "tokens/s"
_QUICK_LIMIT_S = 20.0
_NEIGHBOUR_LIMIT_S = 30.0  # a server that collapses would otherwise take minutes for each load


@frozen
class _Scenario:
    """A load and whether a busy loop takes one core meanwhile."""

    name: str
    load: Load
    neighbour: bool = False


def _one_client(plan: Plan) -> _Scenario:
    return _Scenario("1 client", Load(1, 2, max_tokens=24, limit_s=_QUICK_LIMIT_S) if plan.quick else Load(1, 6))


def _eight_clients(plan: Plan) -> _Scenario:
    return _Scenario("8 clients", Load(8, 8, max_tokens=24, limit_s=_QUICK_LIMIT_S) if plan.quick else Load(8, 24))


def _shared_prefix(plan: Plan) -> _Scenario:
    return _Scenario("8 clients, shared prefix", evolve(_eight_clients(plan).load, shared=True))


def measure_serving(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Ours, llama-server and llama_cpp.server: 1 and 8 clients, and 8 clients that share 300 words."""
    ours, llama_server = Enginehouse(plan.model_file), LlamaServer(plan.model_file)
    llama_cpp_server = LlamaCppServer(plan.model_file, extra_buffers_work(plan.model_file))
    scenarios = [_one_client(plan), _eight_clients(plan), _shared_prefix(plan)]
    record = _measure([ours, llama_server, llama_cpp_server], scenarios, plan, console)
    return record, [
        _compare("1 client", ours, llama_server, 1.0),
        _compare("8 clients", ours, llama_server, 1.0),
        _compare("8 clients", ours, llama_cpp_server, 1.9),
        _compare("8 clients, shared prefix", ours, llama_server, 1.2),
        _compare("1 client", ours, llama_cpp_server, None),
        _compare("8 clients, shared prefix", ours, llama_cpp_server, None),
    ]


def measure_neighbour(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Ours and llama-server, each alone and then while one busy loop occupies one core."""
    ours, llama_server = Enginehouse(plan.model_file), LlamaServer(plan.model_file)
    quiet = [_one_client(plan), _eight_clients(plan)]
    disturbed = [
        _Scenario(
            f"{scenario.name}, busy",
            evolve(scenario.load, limit_s=min(scenario.load.limit_s, _NEIGHBOUR_LIMIT_S)),
            neighbour=True,
        )
        for scenario in quiet
    ]
    record = _measure([ours, llama_server], [*quiet, *disturbed], plan, console)
    comparisons = []
    for before, after in zip(quiet, disturbed, strict=True):
        for peer, target in ((ours, 0.4), (llama_server, None)):
            key, baseline = (Key(scenario.name, peer.name, _THROUGHPUT) for scenario in (after, before))
            comparisons.append(Comparison(key, baseline, target))
        comparisons.append(_compare(after.name, ours, llama_server, 5.0))
    return record, comparisons


def measure_isolation(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Ours with the model in a process of its own and in a thread."""
    process, thread = (Enginehouse(plan.model_file, isolation) for isolation in ("process", "thread"))
    scenarios = [_one_client(plan), _eight_clients(plan)]
    record = _measure([process, thread], scenarios, plan, console)
    return record, [_compare(scenario.name, process, thread, 0.97) for scenario in scenarios]


def _compare(scenario: str, peer: Peer, baseline: Peer, target: float | None) -> Comparison:
    return Comparison(Key(scenario, peer.name, _THROUGHPUT), Key(scenario, baseline.name, _THROUGHPUT), target)


def _measure(peers: Sequence[Peer], scenarios: Sequence[_Scenario], plan: Plan, console: Console) -> Record:
    """Every round starts every peer afresh and drives it through all scenarios, in their order."""
    record = Record()
    for round_number, peer in plan.interleave(peers):
        with running(peer, plan.folder / "logs") as server:
            for scenario in scenarios:
                result = _drive(server, scenario, round_number)
                _add(record, scenario.name, peer.name, result)
                console.print(
                    f"round {round_number + 1}/{plan.num_rounds}  {peer.name}, {scenario.name}:"
                    f" {result.tokens_per_s:.1f} tokens/s"
                )
    return record


def _drive(server: RunningPeer, scenario: _Scenario, round_number: int) -> LoadResult:
    """Warm up with one request per client, which nothing later repeats; then measure."""
    load = scenario.load
    warm_up = evolve(load, num_requests=load.clients, limit_s=load.limit_s / 2)
    with busy_neighbour() if scenario.neighbour else contextlib.nullcontext():
        drive(server.url, warm_up, f"warm-up {scenario.name} {round_number}")
        return drive(server.url, load, f"{scenario.name} {round_number}")


def _add(record: Record, scenario: str, subject: str, result: LoadResult) -> None:
    values = {
        _THROUGHPUT: result.tokens_per_s,
        "first token, ms": 1e3 * result.ttft_median_s,
        "slowest first token, ms": 1e3 * result.ttft_max_s,
        "between tokens, ms": 1e3 * result.itl_median_s,
        "between tokens 99 %, ms": 1e3 * result.itl_99_s,
    }
    for metric, value in values.items():
        record.add(Key(scenario, subject, metric), value)
