"""Writes the responses of ``/completion`` and ``/infill``: events of a stream, or one whole object per choice.

The last event of a choice and its whole object have the same members; the text of a stream is in the events before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, field

from enginehouse.contract.calls import Call
from enginehouse.contract.surface import Answer, Chunk, ErrorAnswer, Piece
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.types import TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse_llama_server.settings import generation_settings

__all__ = ["CompletionAssembler", "error_body"]

_encode = msgspec.json.Encoder().encode
_TEXT_EVENT = (
    b'{"index":%d,"content":%b,"tokens":%b,"stop":false,"id_slot":-1,"tokens_predicted":%d,"tokens_evaluated":%d}'
)
_LOWEST = -3.4028234663852886e38
"""llama-server's log-probability of an impossible token."""


def error_body(error: ErrorAnswer) -> Chunk:
    """Return llama-server's error object, with the name of the error."""
    return {"error": {"code": error.status, "message": error.message, "type": error.kind, "name": error.code}}


@define
class _Choice:
    """A choice so far; ``last_token_ids`` came with its end."""

    texts: list[str] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    last_token_ids: tuple[int, ...] = ()
    probabilities: list[Chunk] = field(factory=list)
    stop_type: str = "none"
    stopping_word: str = ""


class CompletionAssembler:
    """Writes one response.

    Args:
        prompts: one per prompt, as a text.
        num_prompt_tokens: per prompt, as far as known before; None for the only prompt.
        is_many: the response is a list, since the client sent a list of prompts or asked for several choices.
    """

    def __init__(
        self,
        call: Call,
        answer: Answer,
        prompts: Sequence[str],
        num_prompt_tokens: Sequence[int | None],
        *,
        is_many: bool,
    ) -> None:
        self._body, self._answer = call.body, answer
        self._prompts, self._num_prompt_tokens, self._is_many = prompts, num_prompt_tokens, is_many
        self._num_choices = call.body.n_cmpl or call.body.n or 1
        self._choices = [_Choice() for _ in range(len(prompts) * self._num_choices)]
        self._is_post_sampling = bool(answer.parameters.get("post_sampling_probs"))
        self._num_probs = call.body.n_probs if call.body.n_probs is not None else call.body.logprobs or 0
        self._is_usual = answer.is_streamed and not self._num_probs and not call.body.timings_per_token

    def opening(self) -> Sequence[Chunk]:
        """Return nothing: a stream begins with its first token."""
        return ()

    def push(self, piece: Piece) -> Sequence[Chunk | bytes]:
        """Return an event with the text and its tokens, or with the progress of the prompt."""
        if piece.progress is not None:
            return (self._event(piece.index, "", (), prompt_progress=progress_object(piece.progress)),)
        choice = self._choices[piece.index]
        if piece.finish_reason is not None:
            choice.stop_type, choice.stopping_word = _stop(piece)
            choice.token_ids += piece.token_ids
            choice.last_token_ids = piece.token_ids
            return ()
        text = piece.text or piece.reasoning
        if not (text or piece.logprobs):
            return ()
        choice.texts.append(text)
        choice.token_ids += piece.token_ids
        if self._is_usual:  # this runs for every token
            return (self._text_event(choice, piece.index, text, piece.token_ids),)
        more: Chunk = {}
        if self._num_probs:
            scored = [_probability(entry, is_post_sampling=self._is_post_sampling) for entry in piece.logprobs or ()]
            choice.probabilities += scored
            more["completion_probabilities"] = scored
        if not self._answer.is_streamed:
            return ()
        if self._body.timings_per_token:
            more["timings"] = timings(self._answer.usage())
        return (self._event(piece.index, text, piece.token_ids, **more),)

    def _text_event(self, choice: _Choice, index: int, text: str, token_ids: Sequence[int]) -> bytes:
        """Return the event of a text without further members, as JSON."""
        num_evaluated = self._num_evaluated(index, self._answer.num_prompt_tokens)
        members = (index, _encode(text), _encode(token_ids), len(choice.token_ids), num_evaluated)
        return _TEXT_EVENT % members

    def _event(self, index: int, text: str, token_ids: Sequence[int], **more: Any) -> Chunk:
        return {
            "index": index,
            "content": text,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self._choices[index].token_ids),
            "tokens_evaluated": self._num_evaluated(index, self._answer.num_prompt_tokens),
            **more,
        }

    def _num_evaluated(self, index: int, total: int) -> int:
        known = self._num_prompt_tokens[index // self._num_choices]
        return total if known is None else known

    def close(self, usage: Usage, details: dict[str, Any] | None) -> Sequence[Chunk]:
        """Return the last event of each choice."""
        return [
            self._final(index, "", choice.last_token_ids, usage, details) for index, choice in enumerate(self._choices)
        ]

    def fail(self, error: ErrorAnswer) -> Sequence[Chunk]:
        """Return the error as an event."""
        return (error_body(error),)

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk | list[Chunk]:
        """Return the whole response: an object, or a list of them."""
        finals = []
        for index, choice in enumerate(self._choices):
            token_ids = choice.token_ids if self._body.return_tokens else ()
            scored = {"completion_probabilities": choice.probabilities} if self._num_probs else {}
            finals.append(self._final(index, "".join(choice.texts), token_ids, usage, details, **scored))
        return finals if self._is_many else finals[0]

    def _final(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        usage: Usage,
        details: dict[str, Any] | None,
        **more: Any,
    ) -> Chunk:
        choice = self._choices[index]
        is_alone = len(self._choices) == 1
        settings = generation_settings(
            self._answer.parameters,
            stream=self._answer.is_streamed,
            n_probs=self._num_probs,
            grammar=self._body.grammar,
            timings_per_token=self._body.timings_per_token,
        )
        final: Chunk = {
            "index": index,
            "content": text,
            "tokens": list(token_ids),
            "id_slot": -1,
            "stop": True,
            "model": self._answer.model,
            "tokens_predicted": usage.completion_tokens if is_alone else len(choice.token_ids),
            "tokens_evaluated": self._num_evaluated(index, usage.prompt_tokens),
            "generation_settings": settings,
            "prompt": self._prompts[index // self._num_choices],
            "has_new_line": any("\n" in one for one in choice.texts),
            "truncated": False,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": usage.cached_tokens,
            "timings": timings(usage),
            **more,
            **({} if details is None else {"enginehouse": details}),
        }
        return _selected(final, self._body.response_fields) if self._body.response_fields else final


def _stop(piece: Piece) -> tuple[str, str]:
    """Return ``stop_type`` and ``stopping_word``."""
    if piece.finish_reason == "length":
        return "limit", ""
    return ("word", piece.stop_reason) if isinstance(piece.stop_reason, str) else ("eos", "")


def _probability(entry: TokenLogprob, *, is_post_sampling: bool) -> Chunk:
    first, *top = [
        {
            "id": one.token_id,
            "token": one.token.decode("utf-8", "ignore"),
            "bytes": list(one.token),
            **({"prob": math.exp(one.logprob)} if is_post_sampling else {"logprob": max(one.logprob, _LOWEST)}),
        }
        for one in (entry, *entry.top)
    ]
    return {**first, "top_probs" if is_post_sampling else "top_logprobs": top}


def _selected(final: Mapping[str, Any], paths: Sequence[str]) -> Chunk:
    """Return the members at these paths, such as ``generation_settings/n_predict``, by their paths."""
    found: Chunk = {}
    for path in paths:
        value: Any = final
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
