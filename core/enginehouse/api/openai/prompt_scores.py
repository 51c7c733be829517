"""Log-probabilities of prompt tokens: `prompt_logprobs`, `loglikelihood`, and the echo of text completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from attrs import frozen

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.http.frames import encode_json
from enginehouse.api.openai.encoding import (
    chat_logprobs,
    finite_logprob,
    legacy_logprob,
    legacy_top_logprobs,
    token_text,
)
from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import PromptLogprobs, TokenLogprob
from enginehouse.pipeline.pipeline import Pipeline, RunningRequest


class ScoreFields(Protocol):
    """Options read from the request body."""

    @property
    def loglikelihood(self) -> bool:
        """Report the prompt's tokens except the first, in the format of the response's ``logprobs``."""
        ...

    @property
    def prompt_logprobs(self) -> int | None:
        """Report them with this many alternatives, by token id."""
        ...


def score_prompts(assembly: Assembly, fields: ScoreFields) -> None:
    """Report the log-probabilities of the prompts' tokens, if ``fields`` ask for them and the model honours it."""
    is_asked = fields.loglikelihood or fields.prompt_logprobs is not None
    if is_asked and assembly.running[0].request.num_prompt_logprobs is not None:
        assembly.scores = PromptScores(fields, assembly.num_prompts)


class PromptScores:
    """Prompt log-probabilities reported so far, as JSON.

    Args:
        fields: the requested members.
        num_prompts: prompts of the API call.
    """

    def __init__(self, fields: ScoreFields, num_prompts: int) -> None:
        self._likelihood = fields.loglikelihood
        self._num_top = fields.prompt_logprobs
        self._written: list[dict[str, list[bytes]]] = [{} for _ in range(num_prompts)]

    def push(self, prompt: int, event: PromptLogprobs) -> dict[str, Any]:
        """Write a piece; returns the members of a chunk that contains it."""
        written = self._written[prompt]
        pieces: dict[str, list[bytes]] = {}
        if self._num_top is not None:
            first = [] if "prompt_logprobs" in written else [b"null"]
            entries = zip(event.entries, event.ranks, strict=True)
            pieces["prompt_logprobs"] = first + [encode_json(self._ranked(*entry)) for entry in entries]
        if self._likelihood:
            content = chat_logprobs([_alone(entry) for entry in event.entries])["content"]
            pieces["loglikelihood"] = [encode_json(entry) for entry in content]
        for name, items in pieces.items():
            written.setdefault(name, []).append(b",".join(items))
        return {name: _member(name, items) for name, items in pieces.items()}

    def members(self, prompt: int) -> dict[str, Any]:
        """Return the members of a whole response; empty lists for a prompt of one token."""
        written = self._written[prompt]
        members = {}
        if self._num_top is not None:
            members["prompt_logprobs"] = _member("prompt_logprobs", written.get("prompt_logprobs", [b"null"]))
        if self._likelihood:
            members["loglikelihood"] = _member("loglikelihood", written.get("loglikelihood", []))
        return members

    def _ranked(self, entry: TokenLogprob, rank: int) -> dict[str, Any]:
        """Return a token and its alternatives by id, in vLLM's format."""
        ranked = {str(entry.token_id): _scored(entry.token, entry.logprob, rank)}
        for place, other in enumerate(entry.top[: self._num_top], start=1):
            ranked.setdefault(str(other.token_id), _scored(other.token, other.logprob, place))
        return ranked


def _scored(token: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": token.decode("utf-8", "replace")}


def _alone(entry: TokenLogprob) -> TokenLogprob:
    """Remove the alternatives, which only ``prompt_logprobs`` requests."""
    return TokenLogprob(entry.token_id, entry.token, entry.logprob) if entry.top else entry


def _member(name: str, items: list[bytes]) -> msgspec.Raw:
    listed = b"[" + b",".join(items) + b"]"
    return msgspec.Raw(listed if name == "prompt_logprobs" else b'{"content":' + listed + b"}")


@frozen
class Echo:
    """The echo of one prompt.

    Attributes:
        text: the echoed text: the client's, or that of its token ids, with control tokens by name.
        first: id and bytes of the first token, which has no prediction; None if tokens are not reported.
    """

    text: str
    first: tuple[int, bytes] | None = None

    def logprobs(self, scored: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """Return OpenAI's four lists for the whole prompt.

        Args:
            scored: every token except the first.
            num_top: alternatives to show per token; there may be more, requested by another field.
        """
        assert self.first is not None
        scored = [msgspec.structs.replace(entry, top=entry.top[:num_top]) for entry in scored]
        tokens = [self.first[1], *(entry.token for entry in scored)]
        return {
            "tokens": [token_text(token) for token in tokens],
            "token_logprobs": [None, *(legacy_logprob(entry) for entry in scored)],
            "top_logprobs": [None, *(legacy_top_logprobs(entry) for entry in scored)],
            "text_offset": self._offsets(tokens),
        }

    def _offsets(self, tokens: Sequence[bytes]) -> list[int]:
        """Return the offset of each token in the text.

        Tokens may have more text than the prompt: a begin-of-text token or a leading space, which have no offset in it.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = [0]
        for token in tokens:
            starts.append(starts[-1] + len(decoder.decode(token)))
        num_chars = len(self.text)
        surplus = starts[-1] - num_chars
        return [min(max(start - surplus, 0), num_chars) for start in starts[:-1]]


async def read_echo(pipeline: Pipeline, running: RunningRequest) -> Echo:
    """Return the echo of an accepted request, whose prompt is ``text`` or ``token_ids``.

    Raises:
        UnsupportedParameter: the engine does not report prompt tokens.
        EngineError: the model is no longer available.
    """
    request, model, recovery = running.request, running.model, pipeline.recovery
    try:
        text = request.text
        if text is None:
            text = await recovery.detokenize(model, request.token_ids or (), request.caller)
        if request.num_prompt_logprobs is None:
            return Echo(text)
        token_ids = await (await pipeline.prompt(request, model)).tokenize(recovery, request.caller)
        (piece,) = await recovery.pieces(model, token_ids[:1], request.caller)
    except UnsupportedParameter as error:
        raise UnsupportedParameter("echo: this model's engine does not report prompt tokens", "echo") from error
    return Echo(text, (token_ids[0], piece))
