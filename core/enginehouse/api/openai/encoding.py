"""JSON parts of OpenAI's responses: log-probabilities, usage, and chunks that are prepared or held back."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec.structs import asdict

from enginehouse.api.http.frames import encode_json
from enginehouse.contract.backend import LOWEST_LOGPROB
from enginehouse.contract.surface import Chunk, Piece
from enginehouse.contract.timings import usage_times
from enginehouse.contract.types import TokenLogprob
from enginehouse.contract.usage import USAGE_FIELDS, Usage

_TEXT = "\0text\0"


class TextChunks:
    """The usual chunks of a stream, one per token: each is encoded once, and only its text is replaced.

    Args:
        make: returns the chunk of a choice with that text.
        num_choices: number of choices.
    """

    def __init__(self, make: Callable[[int, str], Chunk], num_choices: int) -> None:
        encoded = [encode_json(make(index, _TEXT)) for index in range(num_choices)]
        self._parts = [chunk.rpartition(encode_json(_TEXT)) for chunk in encoded]

    def of(self, piece: Piece) -> tuple[bytes]:
        """Return the chunk of a piece that is only text."""
        start, _, end = self._parts[piece.index]
        return (start + encode_json(piece.text) + end,)


class HeldChunks:
    """Holds back the chunks of a stream that may be the last ones, because these get further members.

    Args:
        until_content: hold back the last chunk with content and those after it; otherwise only the end of a choice.
    """

    def __init__(self, *, until_content: bool) -> None:
        self._until_content = until_content
        self._held: list[Chunk] = []
        self._has_content = False

    def push(self, chunk: Chunk, piece: Piece) -> list[Chunk]:
        """Return the chunks that can be sent, now that ``chunk``, made of ``piece``, follows."""
        has_content = piece.finish_reason is None and piece.scores is None
        if self._has_content and not has_content:
            self._held.append(chunk)
            return []
        ready = self.take()
        if self._until_content or piece.finish_reason is not None:
            self._held, self._has_content = [chunk], self._until_content and has_content
            return ready
        return [*ready, chunk]

    def take(self) -> list[Chunk]:
        """Return the chunks held back, in order."""
        held, self._held = self._held, []
        return held


def held_chunks(usage: str | None, *, has_more: bool) -> HeldChunks | None:
    """Return what holds back the chunks of a stream; None if every chunk can be sent at once.

    Args:
        usage: ``own_chunk``, ``last_content`` or None: the place of the token counts.
        has_more: the last chunk has further members, such as the details.
    """
    if usage == "last_content":
        return HeldChunks(until_content=True)
    return HeldChunks(until_content=False) if has_more and usage is None else None


def with_details(chunks: list[Chunk], details: dict[str, Any] | None) -> list[Chunk]:
    """Add the member ``enginehouse`` to the last chunk, if there are details."""
    if details is not None and chunks:
        chunks[-1]["enginehouse"] = details
    return chunks


def usage_object(usage: Usage, *, has_times: bool = False) -> dict[str, Any]:
    """Return OpenAI's usage object; prompt tokens count once per prompt.

    Args:
        usage: tokens and times.
        has_times: add oMLX's times.
    """
    groups: dict[str, dict[str, int]] = {}
    for name, shown in USAGE_FIELDS.items():
        if shown.group is not None:
            groups.setdefault(shown.group, {})[name] = getattr(usage, name)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **groups,
        **(usage_times(usage) if has_times else {}),
    }


def token_text(token: bytes) -> str:
    r"""Return a token as text; one with only part of a character is written ``bytes:\xf0\x9f``, as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def legacy_logprob(entry: TokenLogprob) -> float:
    """Return the log-probability of a token as a JSON number."""
    return finite_logprob(entry.logprob)


def legacy_top_logprobs(entry: TokenLogprob) -> dict[str, float]:
    """Return the alternatives by text, always including the token itself."""
    ranked = {token_text(other.token): finite_logprob(other.logprob) for other in entry.top}
    ranked.setdefault(token_text(entry.token), finite_logprob(entry.logprob))
    return ranked


def finite_logprob(value: float) -> float:
    """Return a log-probability as a JSON number; minus infinity is replaced."""
    return value if value > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's chat format."""
    content = [
        {
            **_chat_entry(entry.token, entry.logprob),
            "top_logprobs": [_chat_entry(other.token, other.logprob) for other in entry.top],
            **({} if entry.details is None else asdict(entry.details)),
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": finite_logprob(logprob), "bytes": list(token)}


class LegacyLogprobs:
    """OpenAI's format for completions, incrementally: ``text_offset`` continues from the previous piece.

    Args:
        hidden_token_ids: tokens without visible text; they do not move the offset.
        num_chars: characters before the first token.
    """

    def __init__(self, hidden_token_ids: Collection[int], num_chars: int = 0) -> None:
        self._hidden = hidden_token_ids
        self._num_chars = num_chars
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the four lists for the next tokens of the choice, and the tokens' details if there are any."""
        offsets = []
        for entry in entries:
            offsets.append(self._num_chars)
            if entry.token_id not in self._hidden:
                self._num_chars += len(self._decoder.decode(entry.token))
        details = [asdict(entry.details) for entry in entries if entry.details is not None]
        return {
            "tokens": [token_text(entry.token) for entry in entries],
            "token_logprobs": [legacy_logprob(entry) for entry in entries],
            "top_logprobs": [legacy_top_logprobs(entry) for entry in entries],
            "text_offset": offsets,
            **({"token_details": details} if details else {}),
        }
