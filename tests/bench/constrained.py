"""Constrained decoding beside free text, in one running server: throughput, the first token, and constant parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import evolve, frozen
from rich.console import Console

from .forms import constants, open_records, prose, records, unconstrained
from .load import Load, LoadResult, drive
from .peers import Enginehouse, RunningPeer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_constrained"]

_THROUGHPUT = "tokens/s"
_FIRST = "first token, ms"
_ADDED = "first token, ms more than free text"
_ANSWER = "ms per answer"
_FREE = "free text"
_MAX_ADDED_MS = 500.0


@frozen
class _Subject:
    """Answers of one form."""

    name: str
    fields: Callable[[str], Mapping[str, object]]


_MANY = [_Subject(_FREE, unconstrained), _Subject("records", records), _Subject("one long string", prose)]
_COLD = [_Subject(_FREE, unconstrained), _Subject("schema never seen before", open_records)]
_CONSTANT = [_Subject(_FREE, unconstrained), _Subject("long constant parts", constants)]


def measure_constrained(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Free text and forms in turn, round by round, on one server that runs all the time."""
    record = Record()
    scenarios = _Scenarios(plan)
    with running(Enginehouse(plan.model_file), plan.folder / "logs") as server:
        scenarios.warm_up(server)
        for round_number in range(plan.num_rounds):
            scenarios.measure_many(server, record, round_number)
            scenarios.measure_cold(server, record, round_number)
            scenarios.measure_constant(server, record, round_number)
            console.print(f"round {round_number + 1}/{plan.num_rounds} is done")
    return record, scenarios.comparisons()


class _Scenarios:
    """What is measured in every round."""

    def __init__(self, plan: Plan) -> None:
        quick = plan.quick
        self._many = Load(8, 8, max_tokens=24) if quick else Load(8, 24)
        self._cold = Load(1, 3 if quick else 10, max_tokens=4)
        self._constant = Load(1, 2 if quick else 6, max_tokens=400)
        self._num_constant_tokens = 0

    def warm_up(self, server: RunningPeer) -> None:
        """Fill caches, and learn how long an answer with constant parts is."""
        for subject in _MANY:
            drive(server.url, evolve(self._many, num_requests=8, fields=subject.fields), f"warm-up {subject.name}")
        result = drive(server.url, evolve(self._constant, num_requests=1, fields=constants), "warm-up constants")
        self._num_constant_tokens = result.num_tokens

    def measure_many(self, server: RunningPeer, record: Record, round_number: int) -> None:
        """8 clients, tokens per second."""
        for subject, result in self._drive(server, _MANY, self._many, "8 clients", round_number):
            record.add(Key("8 clients", subject.name, _THROUGHPUT), result.tokens_per_s)
            record.add(Key("8 clients", subject.name, "between tokens, ms"), 1e3 * result.itl_median_s)

    def measure_cold(self, server: RunningPeer, record: Record, round_number: int) -> None:
        """1 client, time to the first text; every request brings a schema of its own."""
        first_ms = {}
        for subject, result in self._drive(server, _COLD, self._cold, "cold", round_number):
            first_ms[subject.name] = 1e3 * result.ttft_median_s
            record.add(Key("1 client", subject.name, _FIRST), first_ms[subject.name])
        name = _COLD[1].name
        record.add(Key("1 client", name, _ADDED), first_ms[name] - first_ms[_FREE])

    def measure_constant(self, server: RunningPeer, record: Record, round_number: int) -> None:
        """1 client, time per answer; free text is as many tokens long as the answer with constant parts."""
        load = evolve(self._constant, max_tokens=self._num_constant_tokens)
        for subject, result in self._drive(server, _CONSTANT, load, "constant", round_number):
            record.add(Key("1 client", subject.name, _ANSWER), 1e3 * result.wall_s / load.num_requests)
            record.add(Key("1 client", subject.name, "tokens per answer"), result.num_tokens / load.num_requests)

    def comparisons(self) -> list[Comparison]:
        """The targets."""
        free = Key("8 clients", _FREE, _THROUGHPUT)
        return [
            *(Comparison(Key("8 clients", subject.name, _THROUGHPUT), free, 0.9) for subject in _MANY[1:]),
            Comparison(Key("1 client", _COLD[1].name, _ADDED), None, _MAX_ADDED_MS, target_is_upper=True),
            Comparison(
                Key("1 client", _CONSTANT[1].name, _ANSWER), Key("1 client", _FREE, _ANSWER), 1.0, target_is_upper=True
            ),
        ]

    def _drive(
        self, server: RunningPeer, subjects: Sequence[_Subject], load: Load, what: str, round_number: int
    ) -> Iterator[tuple[_Subject, LoadResult]]:
        """All subjects in turn, each round beginning with another one."""
        first = round_number % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            salt = f"{what} {subject.name} {round_number}"
            yield subject, drive(server.url, evolve(load, fields=subject.fields), salt)
