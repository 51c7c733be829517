"""Rendered segments to token ids: user text never forms control tokens.

Called in the worker, on its tokenizer threads, for every prompt, and where untrusted text is marked before
rendering. Knows the tokenizer's contract (:class:`enginehouse.contract.backend.Tokenizer`); knows no templates.

Text between two control tokens is encoded as one string, whatever the borders of trust inside it, so a tokenizer
sees the same pieces as everywhere else. A prompt without untrusted segments is encoded as a whole, exactly as the
model's own tools do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.types import Segment

__all__ = ["ControlStrings", "bytes_per_token", "control_strings", "encode_segments", "min_tokens"]


class ControlStrings:
    """A set of control-token strings, indexed by first character and length.

    Some models have thousands (Gemma about 6,400), where a regular expression of alternatives would
    try each of them at every ``<``; here a position costs one lookup per distinct length.
    """

    __slots__ = ("_any_first", "_following", "_lengths", "_longest", "_strings")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = frozenset(filter(None, strings))
        lengths: dict[str, set[int]] = {}
        following: dict[str, set[str]] = {}
        for string in self._strings:
            lengths.setdefault(string[0], set()).add(len(string))
            for cut in range(1, len(string)):
                following.setdefault(string[:cut], set()).add(string[cut])
        self._longest = max(map(len, self._strings), default=0)
        self._lengths = {first: sorted(several, reverse=True) for first, several in lengths.items()}
        self._following = following
        self._any_first = re.compile(f"[{re.escape(''.join(lengths))}]") if lengths else None

    def __bool__(self) -> bool:
        return bool(self._strings)

    def __contains__(self, string: str) -> bool:
        return string in self._strings

    def find_all(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of the leftmost, longest, non-overlapping control-token strings.

        No control-token string lies in the text between two of them.
        """
        end = 0
        if self._any_first is None:
            return
        for candidate in self._any_first.finditer(text):
            start = candidate.start()
            if start < end:
                continue
            for length in self._lengths[text[start]]:
                found = text[start : start + length]
                if found in self._strings:
                    end = start + len(found)  # near the end of the text it is a shorter one
                    yield start, end
                    break

    def unfinished(self, text: str) -> tuple[int, frozenset[str]]:
        """How ``text`` could become a control-token string when something is written behind it.

        Returns:
            Start of the longest end of ``text`` that begins a control-token string (the length of ``text``
            if none does), and all characters that would continue one of its ends.
        """
        start, continuations = len(text), set[str]()
        for size in range(1, min(self._longest, len(text) + 1)):
            found = self._following.get(text[len(text) - size :])
            if found:
                start = len(text) - size
                continuations |= found
        return start, frozenset(continuations)


@lru_cache(maxsize=32)
def control_strings(strings: tuple[str, ...]) -> ControlStrings:
    """The index of ``strings``, kept for the models in use."""
    return ControlStrings(strings)


_COUNTED = frozenset(bytes([value]) for value in (0x0A, *range(0x20, 0x7F)))
_NOT_COUNTED = bytes(value for value in range(256) if bytes([value]) not in _COUNTED)


def min_tokens(tokenizer: Tokenizer, segments: Sequence[Segment]) -> int:
    """Lower bound of the number of token ids of a prompt, from its length; 0 where the tokenizer allows for none.

    Only printable ASCII and line feeds are counted: some vocabularies have no token for other bytes and drop them.
    """
    most = tokenizer.max_bytes_per_token
    if most is None:
        return 0
    texts = (segment.text.encode(errors="ignore") for segment in segments)
    return sum(len(text.translate(None, _NOT_COUNTED)) for text in texts) // most


def bytes_per_token(token_bytes: Sequence[bytes]) -> int | None:
    """``max_bytes_per_token`` of a vocabulary; None if a printable byte has no token, so that text may be dropped."""
    return max(map(len, token_bytes)) if _COUNTED.issubset(token_bytes) else None


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment], add_special: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: the model's.
        segments: only control-token strings that lie wholly inside one trusted run become control tokens.
        add_special: put ``tokenizer.prefix_token_ids`` in front, unless the prompt begins with them already.
    """
    token_ids: list[int] = []
    for text, special in _runs(segments, control_strings(tuple(tokenizer.special_tokens))):
        token_ids += tokenizer.encode(text, special)
    prefix = list(tokenizer.prefix_token_ids)
    if add_special and token_ids[: len(prefix)] != prefix:
        return prefix + token_ids
    return token_ids


def _runs(segments: Sequence[Segment], control: ControlStrings) -> Iterator[tuple[str, bool]]:
    """(text, special) in order: each untrusted segment with all text around it up to the next control tokens.

    Those runs hold no trusted control-token string, so they are encoded without any; the runs between
    them begin and end with one and hold no untrusted text.
    """
    # Texts grow as lists of parts: joining at every segment would take quadratic time.
    open_text, is_plain = list[str](), False  # since the last control token; whether untrusted text is in it
    special_text = list[str]()  # trusted text that ends with a control token
    for segment in _merged(segments):
        if not segment.trusted:
            if special_text:
                yield "".join(special_text), True
                special_text = []
            open_text.append(segment.text)
            is_plain = True
            continue
        found = list(control.find_all(segment.text))
        if not found:
            open_text.append(segment.text)
            continue
        first, last = found[0][0], found[-1][1]
        if is_plain:
            yield "".join((*open_text, segment.text[:first])), False
            special_text = [segment.text[first:last]]
        else:
            special_text += *open_text, segment.text[:last]
        open_text, is_plain = [segment.text[last:]], False
    if is_plain:
        yield "".join(open_text), False
    elif text := "".join((*special_text, *open_text)):
        yield text, True


def _merged(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbours of equal trust as one segment; nothing stands between two that only an empty one parts."""
    written = (segment for segment in segments if segment.text)
    for trusted, run in groupby(written, key=lambda segment: segment.trusted):
        yield Segment("".join(segment.text for segment in run), trusted)
