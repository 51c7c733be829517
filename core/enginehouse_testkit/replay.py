"""Position of a request in a script, and the events of its next step.

Driven by the engine ``scripted``; does not wait and does not know slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from attrs import evolve, frozen

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.types import (
    ChoiceFinished,
    EngineRequest,
    Event,
    PromptLogprobs,
    RequestFinished,
    TextDelta,
    TokenDetails,
    TokenLogprob,
    TopLogprob,
)
from enginehouse.contract.usage import Usage
from enginehouse.engine.constraints import ReasoningGate
from enginehouse.engine.text.text_stream import Detokenizer, TextPiece, TextStream
from enginehouse_testkit.script import Script, ScriptToken

__all__ = ["Entry", "Replay", "Tape"]

_NUM_BYTES = 256


@frozen
class Entry:
    """A script token in replayable form: exactly one of token id, delay and error."""

    token_id: int | None
    delay_s: float
    error: str | None


@frozen(eq=False)
class Tape:
    """A script with token ids: 0 to 255 are single bytes, each further text or bytes has an id from 256 on."""

    token_bytes: list[bytes]
    entries: tuple[Entry, ...]
    tokens_per_step: int
    loop: bool
    replies: tuple[tuple[str, tuple[Entry, ...]], ...] = ()

    @classmethod
    def of(cls, script: Script) -> Tape:
        """Assign token ids to ``script``."""
        token_bytes = [bytes([byte]) for byte in range(_NUM_BYTES)]
        ids: dict[bytes, int] = {}
        entries = _entries(script.tokens, token_bytes, ids)
        replies = tuple((reply.when, _entries(reply.tokens, token_bytes, ids)) for reply in script.replies)
        return cls(token_bytes, entries, script.tokens_per_step, script.loop, replies)

    def answering(self, token_ids: Sequence[int]) -> Tape:
        """Return the tape with the answer to a prompt."""
        if not self.replies:
            return self
        prompt = b"".join(self.token_bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")
        entries = next((entries for when, entries in reversed(self.replies) if when in prompt), self.entries)
        return evolve(self, entries=entries)


def _entries(tokens: Sequence[ScriptToken], token_bytes: list[bytes], ids: dict[bytes, int]) -> tuple[Entry, ...]:
    """Return tokens in replayable form; adds those that are new to ``token_bytes`` and ``ids``."""
    entries = []
    for token in tokens:
        if token.delay_s is not None or token.error is not None:
            entries.append(Entry(None, token.delay_s or 0.0, token.error))
            continue
        data = token.text.encode() if token.text is not None else bytes(token.bytes or ())
        if data not in ids:
            ids[data] = len(token_bytes)
            token_bytes.append(data)
        entries.append(Entry(ids[data], 0.0, None))
    return tuple(entries)


class Replay:
    """The position of a request in the script; produces the events of one step at a time."""

    def __init__(self, tape: Tape, request: EngineRequest, num_prompt_tokens: int, max_context: int) -> None:
        self._tape = tape
        self._num_prompt_tokens = num_prompt_tokens
        self._num_logprobs = request.sampling.num_logprobs
        self._num_prompt_logprobs = request.num_prompt_logprobs
        rest = max_context - num_prompt_tokens
        limit = request.stopping.max_tokens
        self._max_tokens = rest if limit is None else min(limit, rest)
        stopping = request.stopping
        self._streams = {
            n: TextStream(tape.token_bytes, frozenset(), stopping.stop, stopping.stop_regex)
            for n in range(request.num_choices)
        }
        self._shows_token_ids = request.return_token_ids
        self._details = TokenDetails() if request.token_details else None
        self._usage: dict[int, Usage] = {}
        self._position = 0  # in the script; all choices advance together
        self._num_made = 0  # tokens per running choice
        self._reasoning: ReasoningGate | None = None
        self._reasoning_end = b""
        if request.reasoning is not None:
            self._reasoning_end = request.reasoning.end.encode()
            detokenizer = Detokenizer(tape.token_bytes, frozenset())
            # Single bytes are tokens, so the bytes of the marker are its token ids.
            self._reasoning = ReasoningGate(request.reasoning, tuple(self._reasoning_end), detokenizer)

    @property
    def is_done(self) -> bool:
        """True if every choice has ended."""
        return not self._streams

    def take_delay(self) -> float:
        """Return the seconds to wait before the next step, 0 for none."""
        entry = self._peek()
        if entry is None or not entry.delay_s:
            return 0.0
        self._position += 1
        return entry.delay_s

    def step(self) -> Sequence[Event]:
        """Return the events of the next ``tokens_per_step`` tokens, possibly none; raises scripted GenerationFailed."""
        events: list[Event] = []
        if self._max_tokens == 0:
            self._finish_all("length", events)
            return events
        for _ in range(self._tape.tokens_per_step):
            entry = self._peek()
            if forced := self._closing_token_ids():
                self._push(forced[0], events, is_forced=True)
                if self._reasoning is not None and self._reasoning.is_over:
                    self._skip_reasoning()
            elif entry is None:
                self._finish_all("stop", events)
            elif entry.error is not None:
                if events:
                    break
                raise GenerationFailed(entry.error)
            elif entry.token_id is None:
                break  # a delay
            else:
                self._position += 1
                self._push(entry.token_id, events)
            if self.is_done:
                break
        return events

    def score(self, token_ids: Sequence[int]) -> list[Event]:
        """Return made-up log-probabilities of a prompt's tokens except the first, if requested."""
        if self._num_prompt_logprobs is None or len(token_ids) < 2:
            return []
        scored = tuple(self._logprob(token_id, self._num_prompt_logprobs) for token_id in token_ids[1:])
        return [PromptLogprobs(scored, (1,) * len(scored))]

    def summary(self, queue_s: float, decode_s: float) -> RequestFinished:
        """Return the final event."""
        own = Usage(prompt_tokens=self._num_prompt_tokens, queue_s=queue_s, decode_s=decode_s)
        return RequestFinished(sum(self._usage.values(), own))

    def _peek(self) -> Entry | None:
        entries = self._tape.entries
        if self._position >= len(entries) and self._tape.loop:
            self._position = 0
        return entries[self._position] if self._position < len(entries) else None

    def _closing_token_ids(self) -> Sequence[int]:
        """Return the remaining tokens of the marker that closes the reasoning once its budget is used up."""
        return self._reasoning.forced_token_ids() if self._reasoning is not None else ()

    def _skip_reasoning(self) -> None:
        """Skip to the end of the script's own reasoning: a model whose reasoning was closed starts its answer."""
        text = b""
        while self._position < len(self._tape.entries) and self._reasoning_end not in text:
            token_id = self._tape.entries[self._position].token_id
            text += b"" if token_id is None else self._tape.token_bytes[token_id]
            self._position += 1

    def _push(self, token_id: int, events: list[Event], is_forced: bool = False) -> None:
        """Push one token to every running choice."""
        self._num_made += 1
        is_reasoning = self._reasoning is not None and self._reasoning.is_inside
        if self._reasoning is not None and not self._reasoning.is_over:
            self._reasoning.accept(token_id, is_forced)
        for choice, stream in list(self._streams.items()):
            piece = stream.push(token_id, is_reasoning=is_reasoning)
            self._report(choice, piece, events)
            if piece.stop is not None:
                self._finish(choice, "stop", piece.stop, events)
        if self._num_made >= self._max_tokens:
            self._finish_all("length", events)

    def _finish_all(self, reason: Literal["stop", "length"], events: list[Event]) -> None:
        for choice, stream in list(self._streams.items()):
            self._report(choice, stream.flush(), events)
            self._finish(choice, reason, None, events)

    def _finish(
        self, choice: int, reason: Literal["stop", "length"], stop_reason: str | None, events: list[Event]
    ) -> None:
        stream = self._streams.pop(choice)
        hidden = stream.hidden_token_ids if self._shows_token_ids else ()
        num_reasoning = self._reasoning.num_tokens if self._reasoning is not None else 0
        usage = self._usage[choice] = Usage(completion_tokens=self._num_made, reasoning_tokens=num_reasoning)
        events.append(ChoiceFinished(choice, reason, usage, stop_reason, hidden))

    def _report(self, choice: int, piece: TextPiece, events: list[Event]) -> None:
        if piece.text or piece.token_ids:
            logprobs = None
            if self._num_logprobs is not None:
                num_top, details = self._num_logprobs, self._details
                logprobs = tuple(self._logprob(token_id, num_top, details) for token_id in piece.token_ids)
            events.append(TextDelta(choice, piece.text, piece.token_ids, logprobs))

    def _logprob(self, token_id: int, num_top: int, details: TokenDetails | None = None) -> TokenLogprob:
        """Return a made-up distribution: the replayed token has probability 1/2, single bytes share the rest."""
        token_bytes = self._tape.token_bytes
        others = [other for other in range(num_top) if other != token_id][: max(0, num_top - 1)]
        ranked = [token_id, *others] if num_top else []
        top = tuple(
            TopLogprob(other, token_bytes[other], -(rank + 1) * math.log(2)) for rank, other in enumerate(ranked)
        )
        return TokenLogprob(token_id, token_bytes[token_id], -math.log(2), top, details)
