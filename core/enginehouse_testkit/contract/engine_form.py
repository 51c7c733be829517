"""The form of an engine that a backend opens: what it declares, and the events of one short answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from enginehouse.contract.engine import Engine, EngineStream
from enginehouse.contract.fields import FIELDS
from enginehouse.contract.types import EngineStats, Event, ModelInfo, RequestFinished
from enginehouse.plugins.results import Expectation
from enginehouse_testkit.contract.engine_driver import EngineDriver
from enginehouse_testkit.contract.form import members_problem, problem_of

__all__ = ["form_of_engine"]


def form_of_engine(driver: EngineDriver) -> str:
    """Return what is wrong with an engine, as one sentence; "" if nothing is."""
    return driver.problem or problem_of(lambda: next(_problems(driver), ""))


def _problems(driver: EngineDriver) -> Iterator[str]:
    engine = driver.engine
    if problem := members_problem("open", Engine, engine):
        yield problem
    if not isinstance(engine.info, ModelInfo):
        yield f"info is {type(engine.info).__name__}, a ModelInfo was expected"
    if undeclared := _undeclared(engine):
        yield (
            f"info.engine lists neither as native nor as refused: {', '.join(undeclared)}; what the engine does not "
            "apply must be in refused, or requests that ask for it are answered without it"
        )
    yield from _problems_of_answer(driver)
    stats = driver.run(engine.stats())
    if wrong := Expectation(EngineStats).check(stats):
        yield f"stats {wrong}"


def _undeclared(engine: Engine) -> list[str]:
    """Return the parameters that core's engine would apply, and that this one does not mention."""
    declared = {*engine.info.engine.native, *engine.info.engine.refused}
    names = {row.member.rpartition(".")[2]: name for name, row in FIELDS.items() if row.by == "engine"}
    return sorted(member for member, name in names.items() if declared.isdisjoint((member, name)))


def _problems_of_answer(driver: EngineDriver) -> Iterator[str]:
    stream = driver.submit(driver.request(max_tokens=3))
    if problem := members_problem("submit", EngineStream, stream):
        yield problem
    batches: list[Sequence[Event]] = []

    async def read() -> None:
        async for batch in stream:
            batches.append(batch)

    driver.run(read())
    driver.cancel_all()
    for batch in batches:
        if wrong := Expectation(Sequence[Event]).check(batch):
            yield f"its stream {wrong}"
        if not batch:
            yield "its stream gave an empty batch; wait until there is an event"
    if not batches or not isinstance(batches[-1][-1], RequestFinished):
        last = type(batches[-1][-1]).__name__ if batches else "nothing"
        yield f"its stream ended after {last}; the last event must be RequestFinished"
