"""Assembly of engine events into choices, for all surfaces, streamed and whole.

An :class:`Assembly` turns events into pieces, through a parser if the output may contain reasoning or tool calls. A
stream sends each piece as it arrives; a whole response folds the same pieces into :class:`Choice` values. Wire formats
are those of a surface's :class:`~enginehouse.contract.surface.Assembler`. Reports of preparers become headers, members
of the details, and metrics here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, Protocol

from attrs import define, field
from msgspec.structs import replace

from enginehouse.api.generation.choice_parser import ChoiceParser, PredictionCount, call_piece
from enginehouse.api.http.access import AccessRecord
from enginehouse.contract.errors import EnginehouseError, GenerationFailed
from enginehouse.contract.preparer import Report
from enginehouse.contract.surface import Assembler, CallPiece, Limit, Piece
from enginehouse.contract.types import (
    CallDelta,
    ChoiceFinished,
    Event,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    RequestFinished,
    TextDelta,
    TokenLogprob,
)
from enginehouse.contract.usage import Usage
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.plugins import Contained
from enginehouse.serving.background import run_with_plugins
from enginehouse.settings.profiles import PROFILES, Profile


def report_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """Return the profile's headers for changed prompts; known before generation starts."""
    changed = {name for one in running for name, report in one.reports.items() if report and report.has_changed}
    headers = profile.optimization_headers
    return [(headers[name], "true") for name in sorted(changed) if name in headers]


def shown_reports(running: Sequence[RunningRequest]) -> dict[str, Any]:
    """Return the details by name of preparer, over all prompts; None if no prompt was to be changed."""
    names = running[0].reports
    return {name: _merged(report for one in running if (report := one.reports[name])) for name in names}


def _merged(reports: Iterable[Report]) -> dict[str, Any] | None:
    merged: dict[str, Any] = {}
    for report in reports:
        for name, value in report.details.items():
            before = merged.get(name)
            is_number = isinstance(value, int | float) and isinstance(before, int | float)
            merged[name] = round(before + value, 3) if is_number else value if before is None else before
    return merged or None


def report_metrics(running: Sequence[RunningRequest]) -> Counter[tuple[str, str]]:
    """Return the metrics of preparers, by name and by the object that did the work."""
    metrics: Counter[tuple[str, str]] = Counter()
    for one in running:
        for report in filter(None, one.reports.values()):
            for name, number in report.metrics.items():
                metrics[name, report.done_by] += number
            for name, number in report.prompt_metrics.items():
                metrics[name, report.done_by] += one.generation.num_prompt_tokens + number
    return metrics


def num_read_tokens(running: Sequence[RunningRequest]) -> int:
    """Return the tokens that models have read for preparers."""
    return sum(report.num_read_tokens for one in running for report in one.reports.values() if report)


@define
class WholeCall:
    """A complete tool call."""

    id: str
    name: str
    arguments: list[str] = field(factory=list)


@define
class Choice:
    """A complete choice: the sum of its pieces."""

    index: int
    texts: list[str] = field(factory=list)
    reasonings: list[str] = field(factory=list)
    calls: list[WholeCall] = field(factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    token_ids: list[int] = field(factory=list)

    def add(self, piece: Piece) -> None:
        """Append ``piece``."""
        self.texts.append(piece.text)
        self.reasonings.append(piece.reasoning)
        if piece.call is not None:
            self._add_call(piece.call)
        if piece.logprobs is not None:
            self.logprobs = self.logprobs if self.logprobs is not None else []
            self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.finish_reason = self.finish_reason or piece.finish_reason

    def note(self, piece: Piece) -> None:
        """Append ``piece`` without its log-probabilities."""
        if piece.text:
            self.texts.append(piece.text)
        elif piece.reasoning:
            self.reasonings.append(piece.reasoning)
        elif piece.call is not None:
            self._add_call(piece.call)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason

    def _add_call(self, piece: CallPiece) -> None:
        if piece.id is not None and piece.name is not None:
            self.calls.append(WholeCall(piece.id, piece.name))
        self.calls[piece.index].arguments.append(piece.arguments)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self.reasonings)


class PromptWriter(Protocol):
    """Writes the log-probabilities of prompts in the format of a surface."""

    def push(self, prompt: int, event: PromptLogprobs) -> dict[str, Any]:
        """Add a part of a prompt; returns the members of a chunk that contains it."""
        ...

    def members(self, prompt: int) -> dict[str, Any]:
        """Return the members of a whole response."""
        ...


@define
class Assembly:
    """Output of all prompts of one API call; choice ``n`` of prompt ``p`` has index ``p * num_choices + n``.

    Implements :class:`enginehouse.contract.surface.Answer`.

    Attributes:
        id: that of the first request, and of the response.
        running: one accepted request per prompt.
        is_streamed: True if pieces are sent as they arrive.
        has_details: True if the response has the extension member.
        choices: output of each choice so far; for a stream, without log-probabilities.
        prompt_logprobs: per prompt, its tokens except the first, if requested; complete before the first piece of that
            prompt.
        scores: writes them for clients that request them explicitly; None if not requested.
        prediction: counts the accepted part of a predicted output; None without a prediction.
        shows_token_ids: the response lists token ids.
        has_begun: True once the engine has sent an event other than the progress of the prefill.
        is_complete: True once everything has ended normally.
        num_tokens: visible tokens received, if the engine reports ids.
        ended: choices that have ended, by index.
        are_foreign: a parser is not our own.
    """

    id: str
    running: Sequence[RunningRequest]
    num_choices: int
    record: AccessRecord
    is_streamed: bool = False
    has_details: bool = False
    finished: list[RequestFinished] = field(factory=list)
    choices: list[Choice] = field(factory=list)
    prompt_logprobs: list[list[TokenLogprob]] = field(factory=list)
    scores: PromptWriter | None = None
    prediction: PredictionCount | None = None
    shows_token_ids: bool = False
    has_begun: bool = False
    is_complete: bool = False
    num_tokens: int = 0
    ended: dict[int, ChoiceFinished] = field(factory=dict)
    are_foreign: bool = False
    _parsers: list[ChoiceParser | None] = field(factory=list)
    _unsent: dict[int, tuple[int, ...]] = field(factory=dict)  # tokens without a piece yet, by index of their choice
    _with_calls: set[int] = field(factory=set)  # choices whose calls were reported by the engine itself

    def __attrs_post_init__(self) -> None:
        self.are_foreign = any(running.parsing.are_foreign for running in self.running)
        self.prompt_logprobs = [[] for _ in self.running]
        self.shows_token_ids = self.running[0].request.return_token_ids
        for prompt, running in enumerate(self.running):
            for choice in range(self.num_choices):
                parser = running.parsing.open()
                index = prompt * self.num_choices + choice
                self._parsers.append(None if parser is None else ChoiceParser(index, parser))
                self.choices.append(Choice(index))

    @property
    def model(self) -> str:
        """The model name for responses: its own name, or in some profiles the requested one."""
        running = self.running[0]
        asked = running.request.model if PROFILES[running.request.profile].names_asked_model else None
        return asked or running.model.name

    @property
    def request_id(self) -> str:
        """Id in the response header ``X-Request-Id``."""
        return self.record.identify()

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters in force for the first request, and the fields of samplers that it sets."""
        used = self.running[0].parameters
        groups = (used.sampling, used.stopping)
        shown = {name: getattr(group, name) for group in groups for name in group.__struct_fields__}
        for fields in shown.pop("extensions").values():
            shown |= fields
        return shown

    def prompt_token_ids(self, prompt: int) -> list[int] | None:
        """Return the token ids of a prompt, if they are requested."""
        token_ids = self.running[prompt].generation.prompt_token_ids if self.shows_token_ids else None
        return None if token_ids is None else list(token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, as counted when they were accepted."""
        return sum(running.generation.num_prompt_tokens for running in self.running)

    @property
    def num_prompts(self) -> int:
        """Number of requests that must end."""
        return len(self.running)

    def pieces(self, prompt: int, events: Sequence[Event]) -> list[Piece]:
        """Return the pieces that a batch of events adds."""
        pieces: list[Piece] = []
        for event in events:
            if type(event) is TextDelta:
                self.has_begun = True
                index = prompt * self.num_choices + event.choice
                self.num_tokens += len(event.token_ids)
                if event.text and self._parsers[index] is None and index not in self._unsent:  # the usual case
                    pieces.append(Piece(index, event.text, event.logprobs, token_ids=event.token_ids))
                else:
                    self._push_text(index, event, pieces)
            elif isinstance(event, PromptProgress):
                pieces.append(Piece(prompt * self.num_choices, progress=event))
            else:
                self.has_begun = True
                self._push_other(prompt, event, pieces)
        return pieces

    async def read(self, prompt: int, events: Sequence[Event]) -> list[Piece]:
        """Return :meth:`pieces`, off the event loop if a parser is not our own."""
        return await run_with_plugins(self.are_foreign, lambda: self.pieces(prompt, events))

    def _push_text(self, index: int, event: TextDelta, pieces: list[Piece]) -> None:
        """Append the pieces of a text that is parsed, empty, or comes after tokens without a piece."""
        parser = self._parsers[index]
        if parser is not None:
            added = parser.push(event.text, event.logprobs)
        else:
            added = [Piece(index, event.text, event.logprobs)] if event.text or event.logprobs else []
        self._unsent[index] = self._unsent.get(index, ()) + event.token_ids
        if added:
            added[0].token_ids = self._unsent.pop(index)
        pieces += added

    def _push_other(self, prompt: int, event: Event, pieces: list[Piece]) -> None:
        """Append the pieces of an event that is neither text nor progress."""
        if isinstance(event, ChoiceFinished):
            self._finish(prompt * self.num_choices + event.choice, event, pieces)
        elif isinstance(event, RequestFinished):
            self.finished.append(event)
        elif isinstance(event, PromptLogprobs):
            self._score(prompt, event, pieces)
        elif isinstance(event, ReasoningDelta):
            pieces.append(Piece(prompt * self.num_choices + event.choice, reasoning=event.text))
        elif isinstance(event, CallDelta):
            index = prompt * self.num_choices + event.choice
            self._with_calls.add(index)
            pieces.append(Piece(index, call=call_piece(event)))

    def _score(self, prompt: int, event: PromptLogprobs, pieces: list[Piece]) -> None:
        self.prompt_logprobs[prompt] += event.entries
        if self.scores is not None:
            pieces.append(Piece(prompt * self.num_choices, scores=self.scores.push(prompt, event)))

    def _finish(self, index: int, event: ChoiceFinished, pieces: list[Piece]) -> None:
        self.ended[index] = event
        parser, stop = self._parsers[index], event.stop_reason
        if isinstance(stop, str) and self.running[index // self.num_choices].request.includes_stop:
            pieces += [Piece(index, stop)] if parser is None else parser.push(stop, None)
        if parser is None:
            calls = index in self._with_calls and event.finish_reason == "stop"
            pieces.append(Piece(index, finish_reason="tool_calls" if calls else event.finish_reason))
        else:
            pieces += parser.finish(event.finish_reason)
        pieces[-1].stop_reason, pieces[-1].limit = event.stop_reason, self._limit(index, event)
        pieces[-1].token_ids = self._unsent.pop(index, ()) + event.token_ids

    def _limit(self, index: int, event: ChoiceFinished) -> Limit | None:
        """Return what ended a choice of the finish reason ``length``."""
        if event.finish_reason != "length":
            return None
        most = self.running[index // self.num_choices].parameters.stopping.max_tokens
        return "context" if most is None or event.usage.completion_tokens < most else "max_tokens"

    async def fold(
        self,
        batches: AsyncIterator[tuple[int, Sequence[Event]]],
        assembler: Assembler,
        push: Callable[[Assembler, Piece], Awaitable[None]] | None = None,
    ) -> None:
        """Collect every choice for a whole response, until the last one has ended.

        Args:
            push: calls the assembler of a surface that is not our own.
        """
        mark = self.record.pace.mark
        async for prompt, events in batches:
            pieces = await self.read(prompt, events) if self.are_foreign else self.pieces(prompt, events)
            if pieces and pieces[-1].scores is None and pieces[-1].progress is None:
                mark()
            for piece in pieces:
                if piece.scores is None and piece.progress is None:
                    self.choices[piece.index].add(piece)
            for piece in pieces:
                if push is not None:
                    await push(assembler, piece)
                else:
                    assembler.push(piece)

    def sent(self, pieces: Sequence[Piece]) -> None:
        """Record the time and content of pieces that a stream has sent."""
        self.record.pace.mark()
        choices = self.choices
        for piece in pieces:
            if piece.text and piece.finish_reason is None:  # the usual case; this runs for every token
                choices[piece.index].texts.append(piece.text)
            else:
                choices[piece.index].note(piece)

    def complete(self) -> None:
        """Check that everything has ended and store the results in the access record."""
        if len(self.finished) < self.num_prompts or len(self.ended) < self.num_prompts * self.num_choices:
            raise GenerationFailed("The engine ended the request before it was complete.")
        record = self.record
        record.finish_reasons = [event.finish_reason for event in self.ended.values()]
        record.outcome = ",".join(sorted(set(record.finish_reasons)))
        record.usage, record.is_complete = self.total(), True
        record.metrics |= report_metrics(self.running)
        self.is_complete = True

    def break_off(self) -> None:
        """Record the usage so far of a response that ends before it is complete."""
        self.record.usage = replace(
            self.total(), prompt_tokens=self.num_prompt_tokens, completion_tokens=self.num_tokens
        )
        self.record.metrics |= report_metrics(self.running)

    def total(self) -> Usage:
        """Return the usage of all prompts that have ended, with what the engines do not know; fixed once complete."""
        if self.record.is_complete and self.record.usage is not None:
            return self.record.usage
        routed = [running.routed for running in self.running if running.routed is not None]
        predicted = self.prediction
        usages = [event.usage for event in self.finished]
        return replace(
            reduce(add, usages) if usages else Usage(),
            replays=sum(running.generation.num_replays for running in self.running),
            routed_requests=len(routed),
            routing_attempts=sum(1 + len(one.tried) for one in routed),
            discarded_tokens=sum(one.num_discarded_tokens for one in routed),
            accepted_prediction_tokens=predicted.num_accepted if predicted is not None else 0,
            rejected_prediction_tokens=predicted.num_rejected if predicted is not None else 0,
            load_s=max(running.load_s for running in self.running),
            render_s=max(running.render_s for running in self.running),
            tokenize_s=max(running.tokenize_s for running in self.running),
            first_token_s=self.record.pace.first_s or 0.0,
            total_s=time.perf_counter() - self.record.began,
        )

    def usage(self) -> Usage:
        """Return the usage so far; before the end, tokens and times are those that the server sees."""
        total = self.total()
        if len(self.finished) == self.num_prompts:
            return total
        waited_s = total.first_token_s - total.load_s - total.render_s - total.tokenize_s
        return replace(
            total,
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_tokens,
            prefill_s=max(0.0, waited_s),
            decode_s=total.total_s - total.first_token_s if total.first_token_s else 0.0,
        )

    async def counting(
        self, batches: AsyncIterator[tuple[int, Sequence[Event]]], prediction: PredictionCount
    ) -> AsyncIterator[tuple[int, Sequence[Event]]]:
        """Yield the same batches, comparing their tokens with the prediction."""
        self.prediction = prediction
        async for prompt, events in batches:
            for event in events:
                if isinstance(event, TextDelta):
                    prediction.push(event.token_ids)
            yield prompt, events


async def event_batches(running: Sequence[RunningRequest]) -> AsyncIterator[tuple[int, Sequence[Event]]]:
    """Yield batches of events of one or several requests as they arrive, each with the index of its request."""
    if len(running) == 1:
        async for batch in running[0].generation:
            yield 0, batch
        return
    # Bounded, so that events wait where they are counted if the client does not read.
    arrived: asyncio.Queue[tuple[int, Sequence[Event]] | EnginehouseError | None] = asyncio.Queue(len(running))

    async def collect(index: int) -> None:
        failed: list[EnginehouseError] = []
        with Contained(failed.append, "reading an answer failed"):
            async for batch in running[index].generation:
                await arrived.put((index, batch))
        await arrived.put(failed[0] if failed else None)

    tasks = [asyncio.create_task(collect(index)) for index in range(len(running))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, EnginehouseError):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
