"""Rendered segments to token ids: user text never forms control tokens.

Called in the worker, on its intake thread, for every prompt. Knows the tokenizer's contract
(:class:`enginehouse.contract.backend.Tokenizer`); knows no templates.

Text between two control tokens is encoded as one string, whatever the borders of trust inside it, so a
tokenizer sees the same pieces as everywhere else. A prompt without untrusted segments is encoded as a
whole, exactly as the model's own tools do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.types import Segment
from enginehouse.engine.text.control_strings import ControlStrings, control_strings

__all__ = ["bytes_per_token", "encode_segments", "min_tokens"]

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
