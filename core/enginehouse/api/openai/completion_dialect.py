"""Responses of ``/v1/completions``: whole, as events, with the prompt echoed, and the best of several choices."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from enginehouse.api.http.sse import event
from enginehouse.api.openai.answer import Assembly, Choice, model_name
from enginehouse.api.openai.choice_parser import Piece
from enginehouse.api.openai.encoding import LegacyLogprobs, encode_json, encode_line
from enginehouse.api.openai.prompt_scores import Echo

__all__ = ["CompletionDialect", "CompletionOptions"]


class CompletionOptions(Protocol):
    """Options that the dialect reads from the request body."""

    @property
    def n(self) -> int:
        """Number of choices to return per prompt."""
        ...

    @property
    def logprobs(self) -> int | None:
        """Number of alternatives to report per token; None reports nothing."""
        ...

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        ...


class CompletionDialect:
    """Writes ``text_completion`` objects, whole and as events.

    Args:
        echoes: one per prompt if prompts are echoed, else empty.
    """

    def __init__(
        self, request_id: str, assembly: Assembly, options: CompletionOptions, echoes: Sequence[Echo] = ()
    ) -> None:
        model = assembly.running[0].model
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name(assembly.running[0]),
            "system_fingerprint": assembly.running[0].card.fingerprint,
        }
        self._assembly = assembly
        self._options = options
        self._echoes = echoes
        hidden = frozenset(model.info.special_tokens.values())
        self._logprobs = [
            LegacyLogprobs(hidden, num_chars=len(self._echo_text(index)))
            for index in range(assembly.num_choices * assembly.num_prompts)
        ]
        self._is_echoed = [not echoes] * len(self._logprobs)
        self._start = b"data: " + encode_line(self._head)[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if options.include_usage else b""
        self._end = b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def opening(self) -> bytes:
        """Return nothing: these chunks have no roles."""
        return b""

    def event(self, piece: Piece) -> bytes:
        """Return a chunk with text or with the finish reason; the first one of a choice follows the echoed prompt."""
        if piece.scores is not None:
            return self._scores_event(piece.index, piece.scores)
        if not self._is_echoed[piece.index]:
            return self._echo_event(piece.index) + self.event(piece)
        if piece.finish_reason is None and piece.logprobs is None:
            return self._start + str(piece.index).encode() + b',"text":' + encode_line(piece.text) + self._end
        logprobs = None if piece.logprobs is None else self._logprobs[piece.index].take(piece.logprobs)
        return self._chunk(piece.index, piece.text, logprobs, piece.finish_reason)

    def _echo_event(self, index: int) -> bytes:
        """Return a chunk with the prompt."""
        self._is_echoed[index] = True
        return self._chunk(index, self._echo_text(index), self._echo_logprobs(index), None)

    def _scores_event(self, index: int, scores: dict[str, Any]) -> bytes:
        """Return a chunk of the prompt's first choice that describes the prompt."""
        choice = {"index": index, "text": "", **scores, "logprobs": None, "finish_reason": None}
        return b"data: " + encode_line({**self._head, "choices": [choice]})[:-1] + self._usage + b"}\n\n"

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        start = self._start + str(index).encode() + b',"text":' + encode_line(text) + b',"logprobs":'
        end = b',"finish_reason":' + encode_json(finish_reason) + b"}]" + self._usage + b"}\n\n"
        return start + encode_line(logprobs) + end

    def flush(self) -> bytes:
        """Return nothing: events are never held back."""
        return b""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk without choices that has the token counts."""
        return event(encode_line({**self._head, "choices": [], "usage": usage}))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """Return the whole response."""
        written = [
            {
                "index": index,
                "text": self._echo_text(choice.index) + choice.text,
                **self._scores(choice.index),
                "logprobs": self._whole_logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._shown(choices))
        ]
        return encode_json({**self._head, "choices": written, "usage": usage})

    def _shown(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the choices, or the ``n`` best ones of each prompt, best first."""
        num_drawn, num_shown = self._assembly.num_choices, self._options.n
        if num_drawn == num_shown:
            return list(choices)
        drawn = [choices[start : start + num_drawn] for start in range(0, len(choices), num_drawn)]
        return [choice for group in drawn for choice in sorted(group, key=_mean_logprob, reverse=True)[:num_shown]]

    def _whole_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._options.logprobs is None:
            return None
        answered = None if choice.logprobs is None else self._logprobs[choice.index].take(choice.logprobs)
        echoed = self._echo_logprobs(choice.index)
        if echoed is None or answered is None:
            return echoed or answered
        unknown = [None] * len(echoed["tokens"])  # the prompt's tokens have no details
        return {name: [*echoed.get(name, unknown), *values] for name, values in answered.items()}

    def _scores(self, index: int) -> dict[str, Any]:
        """Return the members that describe the prompt, the same for all its choices."""
        scores = self._assembly.scores
        return {} if scores is None else scores.members(index // self._assembly.num_choices)

    def _echo_text(self, index: int) -> str:
        return self._echoes[index // self._assembly.num_choices].text if self._echoes else ""

    def _echo_logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the prompt's log-probabilities for a choice, if requested."""
        prompt = index // self._assembly.num_choices
        if not self._echoes or self._options.logprobs is None or self._echoes[prompt].first is None:
            return None
        return self._echoes[prompt].logprobs(self._assembly.prompt_logprobs[prompt], self._options.logprobs)


def _mean_logprob(choice: Choice) -> float:
    """Return OpenAI's ranking key; a choice without tokens comes last."""
    logprobs = choice.logprobs or ()
    return sum(entry.logprob for entry in logprobs) / len(logprobs) if logprobs else -math.inf
