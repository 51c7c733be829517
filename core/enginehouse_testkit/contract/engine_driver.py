"""Driver of an engine in contract tests, for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar, cast

from attrs import define, field

from enginehouse.contract.engine import Engine, EngineStream
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import (
    ChoiceFinished,
    Constraint,
    EngineRequest,
    Event,
    PromptLogprobs,
    RequestFinished,
    SamplingParams,
    Segment,
    StopParams,
    TextDelta,
    TokenLogprob,
)

__all__ = ["Answer", "EngineDriver"]

_T = TypeVar("_T")
_numbers = itertools.count()


@define
class Answer:
    """The events of one request, in order."""

    events: list[Event] = field(factory=list)

    def deltas(self, choice: int = 0) -> list[TextDelta]:
        """Return the text deltas of a choice."""
        return [event for event in self.events if isinstance(event, TextDelta) and event.choice == choice]

    def text(self, choice: int = 0) -> str:
        """Return the whole text of a choice."""
        return "".join(delta.text for delta in self.deltas(choice))

    def token_ids(self, choice: int = 0) -> list[int]:
        """Return the tokens of the visible text."""
        return [token_id for delta in self.deltas(choice) for token_id in delta.token_ids]

    def logprobs(self, choice: int = 0) -> list[TokenLogprob]:
        """Return one entry per token, if requested."""
        return [entry for delta in self.deltas(choice) for entry in delta.logprobs or ()]

    def finished(self, choice: int = 0) -> ChoiceFinished:
        """Return the final event of a choice."""
        (end,) = [event for event in self.events if isinstance(event, ChoiceFinished) and event.choice == choice]
        return end

    @property
    def summary(self) -> RequestFinished:
        """The last event."""
        last = self.events[-1]
        assert isinstance(last, RequestFinished), "the last event must be RequestFinished"
        return last

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """The log-probability entries of the prompt."""
        return [entry for event in self.events if isinstance(event, PromptLogprobs) for entry in event.entries]


class EngineDriver:
    """Creates requests and waits for their answers.

    Attributes:
        engine: the engine, unless there is a problem.
        problem: why it could not be opened, as one sentence; else "".
    """

    def __init__(self, engine: Engine | None, loop: asyncio.Runner, problem: str = "") -> None:
        self.problem = problem
        self.engine = cast(Engine, engine)
        self._loop = loop
        self._submitted: list[EngineStream] = []

    def run(self, waiting: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the event loop on which the engine was created."""
        return self._loop.run(waiting)

    def request(
        self,
        prompt: str = "Once upon a time",
        *,
        max_tokens: int | None = 12,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = True,
        token_ids: Sequence[int] | None = None,
        num_choices: int = 1,
        num_prompt_logprobs: int | None = None,
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> EngineRequest:
        """Create a request; by default greedy, and not stopped by end tokens."""
        return EngineRequest(
            request_id=f"kit-{next(_numbers)}",
            segments=(Segment(prompt),),
            token_ids=None if token_ids is None else tuple(token_ids),
            add_special=True,
            num_choices=num_choices,
            num_prompt_logprobs=num_prompt_logprobs,
            constraint=constraint,
            sampling=SamplingParams(**{"temperature": 0.0, "seed": 7, **sampling}),
            stopping=StopParams(
                max_tokens=max_tokens,
                stop=tuple(stop),
                stop_regex=tuple(stop_regex),
                stop_token_ids=tuple(stop_token_ids),
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
            ),
        )

    def answer(self, request: EngineRequest) -> Answer:
        """Return the answer; raise its error."""
        return self.run(self._collect(request))

    def ask(self, prompt: str = "Once upon a time", **fields: Any) -> Answer:
        """Return the answer to :meth:`request` with the same arguments."""
        return self.answer(self.request(prompt, **fields))

    def answers(self, requests: Sequence[EngineRequest]) -> list[Answer | BaseException]:
        """Return the answers to requests sent at once; an error takes the place of its answer."""
        return self.run(self._collect_all(requests))

    def submit(self, request: EngineRequest) -> EngineStream:
        """Submit a request without reading from it."""
        stream = self.run(self.engine.submit(request))
        self._submitted.append(stream)
        return stream

    def cancel_all(self) -> None:
        """Cancel the requests of :meth:`submit`, so that one that should have been refused takes no place."""
        submitted, self._submitted = self._submitted, []

        async def cancel() -> None:
            for stream in submitted:
                stream.cancel()

        self.run(cancel())

    async def _collect_all(self, requests: Sequence[EngineRequest]) -> list[Answer | BaseException]:
        # All are submitted before any is read, so that they run in one batch.
        generations = await asyncio.gather(*map(self.engine.submit, requests), return_exceptions=True)
        found = [self._read(item) if not isinstance(item, BaseException) else _raise(item) for item in generations]
        return list(await asyncio.gather(*found, return_exceptions=True))

    async def _collect(self, request: EngineRequest) -> Answer:
        return await self._read(await self.engine.submit(request))

    async def _read(self, generation: EngineStream) -> Answer:
        answer = Answer()
        async for events in generation:
            assert events, "a batch of events must not be empty"
            answer.events += events
        assert generation.num_prompt_tokens == answer.summary.usage.prompt_tokens
        return answer


async def _raise(error: BaseException) -> Answer:
    assert isinstance(error, EnginehouseError), f"engines raise EnginehouseErrors, not {error!r}"
    raise error
