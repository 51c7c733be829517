"""Rendered segments to token ids: user text never forms control tokens.

Called in the worker, on its tokenizer threads, for every prompt, and where untrusted text is marked before rendering.
Knows the tokenizer's contract (:class:`enginehouse.contract.backend.Tokenizer`); does not know templates.

Text between two control tokens is encoded as one string, across trusted and untrusted segments, so that the tokenizer
sees the usual pieces. A prompt without untrusted segments is encoded as a whole, exactly as the model's own tools do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from enginehouse.contract.types import Segment

if TYPE_CHECKING:  # NumPy would be half of the start-up time of a rendering process
    from enginehouse.contract.backend import Tokenizer


class ControlStrings:
    """A set of control-token strings, indexed by first character and length.

    Some models have thousands (Gemma about 6,400); a regular expression of alternatives would try each of them at every
    ``<``, while this index needs one lookup per distinct length at each position.
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
        """Yield (start, end) of the leftmost, longest, non-overlapping control-token strings.

        The text between two of them contains no control-token string.
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
                    end = start + len(found)  # shorter near the end of the text
                    yield start, end
                    break

    def unfinished(self, text: str) -> tuple[int, frozenset[str]]:
        """Return how ``text`` could be continued to a control-token string.

        Returns:
            Start of the longest suffix of ``text`` that begins a control-token string (the length of ``text`` if there
            is none), and all characters that would continue any such suffix.
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
    """Return the index of ``strings``, cached for the models in use."""
    return ControlStrings(strings)


_COUNTED = frozenset(bytes([value]) for value in (0x0A, *range(0x20, 0x7F)))
_NOT_COUNTED = bytes(value for value in range(256) if bytes([value]) not in _COUNTED)


def min_tokens(tokenizer: Tokenizer, segments: Sequence[Segment]) -> int:
    """Return a lower bound of a prompt's token count, from its length; 0 if the tokenizer allows none.

    Only printable ASCII and line feeds are counted: some vocabularies have no token for other bytes and drop them.
    """
    most = tokenizer.max_bytes_per_token
    if most is None:
        return 0
    texts = (segment.text.encode(errors="ignore") for segment in segments if segment.media is None)
    return sum(len(text.translate(None, _NOT_COUNTED)) for text in texts) // most


def bytes_per_token(token_bytes: Sequence[bytes]) -> int | None:
    """Return ``max_bytes_per_token``; None if a counted byte has no token, so that text may be dropped."""
    return max(map(len, token_bytes)) if _COUNTED.issubset(token_bytes) else None


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment], add_special: bool) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        tokenizer: tokenizer of the model.
        segments: only control-token strings entirely inside one trusted run become control tokens.
        add_special: prepend ``tokenizer.prefix_token_ids``, unless the prompt begins with them already.
    """
    token_ids: list[int] = []
    for text, special in _runs(segments, control_strings(tuple(tokenizer.special_tokens))):
        token_ids += tokenizer.encode(text, special)
    prefix = list(tokenizer.prefix_token_ids)
    if add_special and token_ids[: len(prefix)] != prefix:
        return prefix + token_ids
    return token_ids


def _runs(segments: Sequence[Segment], control: ControlStrings) -> Iterator[tuple[str, bool]]:
    """Yield (text, special) in order: each untrusted segment with all text up to the adjacent control tokens.

    These runs contain no trusted control-token string, so they are encoded without any; the runs between them begin and
    end with one and contain no untrusted text.
    """
    # Texts are built as lists of parts: joining at every segment would take quadratic time.
    open_text, is_plain = list[str](), False  # since the last control token; and if it has untrusted text
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
    """Merge neighbours of equal trust; empty segments do not separate their neighbours."""
    written = (segment for segment in segments if segment.text)
    for trusted, run in groupby(written, key=lambda segment: segment.trusted):
        yield Segment("".join(segment.text for segment in run), trusted)
