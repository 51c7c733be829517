"""How probable a prompt's own tokens are, as clients ask for it: ``prompt_logprobs`` and ``loglikelihood``.

Written as the events come, a piece at a time, so that a long prompt does not hold up the event loop. A stream passes
each piece on, and a reader joins the lists; a whole answer holds all of them. The first token has no probability:
nothing predicts it.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from enginehouse.api.openai.encoding import chat_logprobs, encode_json, finite_logprob
from enginehouse.contract.types import PromptLogprobs, TokenLogprob

__all__ = ["PromptScores", "ScoreFields"]


class ScoreFields(Protocol):
    """What is asked of a request body."""

    @property
    def loglikelihood(self) -> bool:
        """Report the prompt's tokens but the first, in the form of an answer's ``logprobs``."""
        ...

    @property
    def prompt_logprobs(self) -> int | None:
        """Report them with this many alternatives, by token id."""
        ...


class PromptScores:
    """What has been reported so far, as JSON.

    Args:
        fields: which of the two members are wanted.
        num_prompts: prompts of the API call.
    """

    def __init__(self, fields: ScoreFields, num_prompts: int) -> None:
        self._likelihood = fields.loglikelihood
        self._num_top = fields.prompt_logprobs
        self._written: list[dict[str, list[bytes]]] = [{} for _ in range(num_prompts)]

    def push(self, prompt: int, event: PromptLogprobs) -> dict[str, Any]:
        """Write a piece; returns the members of a chunk that holds it."""
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
        """The members of a whole answer; a prompt of one token has empty ones."""
        written = self._written[prompt]
        members = {}
        if self._num_top is not None:
            members["prompt_logprobs"] = _member("prompt_logprobs", written.get("prompt_logprobs", [b"null"]))
        if self._likelihood:
            members["loglikelihood"] = _member("loglikelihood", written.get("loglikelihood", []))
        return members

    def _ranked(self, entry: TokenLogprob, rank: int) -> dict[str, Any]:
        """A token and its alternatives by id, in the form that vLLM gave them."""
        ranked = {str(entry.token_id): _scored(entry.token, entry.logprob, rank)}
        for place, other in enumerate(entry.top[: self._num_top], start=1):
            ranked.setdefault(str(other.token_id), _scored(other.token, other.logprob, place))
        return ranked


def _scored(token: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": token.decode("utf-8", "replace")}


def _alone(entry: TokenLogprob) -> TokenLogprob:
    """Without alternatives, which only ``prompt_logprobs`` asks for."""
    return TokenLogprob(entry.token_id, entry.token, entry.logprob) if entry.top else entry


def _member(name: str, items: list[bytes]) -> msgspec.Raw:
    listed = b"[" + b",".join(items) + b"]"
    return msgspec.Raw(listed if name == "prompt_logprobs" else b'{"content":' + listed + b"}")
