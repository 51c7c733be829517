"""The generation that pipeline and API hold: reading ahead, ending from outside, its lease and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from attrs import define, field

from enginehouse.contract.errors import EngineDead, EnginehouseError, ModelUnloaded
from enginehouse.contract.types import Event, RequestFinished, TextDelta, TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse.recovery import Generation
from enginehouse.serving.leases import Uses

LOGPROBS = (TokenLogprob(0, b"x", -0.1),)
FIRST, SECOND, END = (
    [TextDelta(0, "a", (0,), LOGPROBS)],
    [TextDelta(0, "b", (1,), LOGPROBS)],
    [RequestFinished(Usage(prompt_tokens=3, completion_tokens=2))],
)


@define
class Stream:
    """The stream of an engine: its batches, and what ends it."""

    batches: Sequence[Sequence[Event]] = (FIRST, SECOND, END)
    error: EnginehouseError | None = None
    num_prompt_tokens: int = 3
    num_waiting_events: int = 2
    hangs: bool = False
    cancelled: asyncio.Event = field(factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        for batch in self.batches:
            yield batch
        if self.error is not None:
            raise self.error
        if self.hangs:
            await self.cancelled.wait()

    def cancel(self) -> None:
        self.cancelled.set()


@define
class Outcome:
    """Records what it is told."""

    told: list[object] = field(factory=list)

    def answered(self) -> None:
        self.told.append("answered")

    def raised(self, error: EnginehouseError) -> None:
        self.told.append(error)

    def ended(self) -> None:
        if "ended" not in self.told:
            self.told.append("ended")


async def read(generation: Generation) -> list[Sequence[Event]]:
    return [batch async for batch in generation]


async def test_what_was_read_ahead_comes_first() -> None:
    generation = Generation(Stream())
    assert await generation.read_ahead() == FIRST
    assert await generation.read_ahead() == SECOND

    assert await read(generation) == [FIRST, SECOND, END]
    assert await generation.read_ahead() is None


async def test_logprobs_are_hidden_from_the_reader_only() -> None:
    generation = Generation(Stream())
    generation.hides_logprobs = True
    assert await generation.read_ahead() == FIRST

    assert await read(generation) == [[TextDelta(0, "a", (0,))], [TextDelta(0, "b", (1,))], END]


async def test_status_without_recovery() -> None:
    generation = Generation(Stream())

    assert (generation.num_prompt_tokens, generation.num_waiting_events) == (3, 2)
    assert generation.has_started
    assert generation.num_replays == 0


@pytest.mark.parametrize("closes", [True, False], ids=["closed early", "read to its end"])
async def test_lease_ends_with_its_generation(closes: bool) -> None:
    uses: Uses[str] = Uses()
    stream = Stream()
    generation = Generation(stream)
    generation.keep(uses.add("model"))  # type: ignore[arg-type]
    batches = aiter(generation)
    assert await anext(batches) == FIRST
    assert len(uses) == 1
    if closes:
        await batches.aclose()  # type: ignore[attr-defined]
    else:
        assert [batch async for batch in batches] == [SECOND, END]

    assert len(uses) == 0
    assert stream.cancelled.is_set()


async def test_generation_fails_with_the_reason_why_its_lease_ends() -> None:
    uses: Uses[str] = Uses()
    generation = Generation(Stream([FIRST], hangs=True))
    generation.keep(uses.add("model"))  # type: ignore[arg-type]
    batches = aiter(generation)
    await anext(batches)
    reading = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    uses.end_all(ModelUnloaded("by its operator"))
    with pytest.raises(ModelUnloaded):
        await reading

    assert len(uses) == 0


async def test_lease_that_has_ended_fails_the_generation_at_once() -> None:
    uses: Uses[str] = Uses()
    lease = uses.add("model")
    lease.end(ModelUnloaded("by its operator"))
    generation = Generation(Stream())
    generation.keep(lease)  # type: ignore[arg-type]
    with pytest.raises(ModelUnloaded):
        await read(generation)


async def test_cancelled_generation_ends_without_an_error_and_without_events() -> None:
    generation = Generation(Stream())
    generation.cancel()

    assert await read(generation) == []


@pytest.mark.parametrize("batches", [(), (FIRST,)], ids=["before the first batch", "after it"])
async def test_outcome_is_reported_once(batches: Sequence[Sequence[Event]]) -> None:
    error, outcome = EngineDead("gone"), Outcome()
    generation = Generation(Stream(batches, error))
    generation.outcome_observer = outcome
    with pytest.raises(EngineDead):
        await read(generation)

    assert outcome.told == ["answered" if batches else error, "ended"]
