"""Rendered segments to token ids: user text never forms control tokens.

Called in the worker, on its intake thread, for every prompt. Knows the tokenizer's contract
(:class:`enginehouse.backend.Tokenizer`); knows no templates.

Text between two control tokens is encoded as one string, whatever the borders of trust inside it, so a
tokenizer sees the same pieces as everywhere else. A prompt without untrusted segments is encoded as a
whole, exactly as the model's own tools do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from enginehouse.backend import Tokenizer
from enginehouse.prompt.control_strings import ControlStrings, control_strings
from enginehouse.types import Segment

__all__ = ["encode_segments"]


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
    open_text, is_plain = "", False  # text since the last control token; whether untrusted text is in it
    special_text = ""  # trusted text that ends with a control token
    for segment in _merged(segments):
        if not segment.trusted:
            if special_text:
                yield special_text, True
                special_text = ""
            open_text, is_plain = open_text + segment.text, True
            continue
        found = list(control.find_all(segment.text))
        if not found:
            open_text += segment.text
            continue
        first, last = found[0][0], found[-1][1]
        if is_plain:
            yield open_text + segment.text[:first], False
            special_text = segment.text[first:last]
        else:
            special_text += open_text + segment.text[:last]
        open_text, is_plain = segment.text[last:], False
    if is_plain:
        yield open_text, False
    elif special_text or open_text:
        yield special_text + open_text, True


def _merged(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbours of equal trust as one segment; nothing stands between two that only an empty one parts."""
    text, trusted = "", False
    for segment in segments:
        if not segment.text:
            continue
        if segment.trusted != trusted:
            if text:
                yield Segment(text, trusted)
            text, trusted = "", segment.trusted
        text += segment.text
    if text:
        yield Segment(text, trusted)
