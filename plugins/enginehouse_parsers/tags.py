"""Finds tags in text that comes in pieces, and says how much text must wait because a tag may be beginning."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["end_of_white", "is_remnant", "num_held", "split_at_tag"]

_REMNANT_CHARS = 5
_CUT_REMNANT_CHARS = 2


_WHITE = re.compile(r"\s*+")
_JSON_WHITE = re.compile(r"[ \t\n\r]*+")


def end_of_white(text: str, start: int, is_json: bool = True) -> int:
    """Place of the first character from ``start`` on that is not white space, of JSON or of any kind.

    Text that is held back is looked at again with each piece that comes; so that time does not grow with its square,
    white space that was seen is not looked at again.
    """
    found = (_JSON_WHITE if is_json else _WHITE).match(text, start)
    return start if found is None else found.end()


def split_at_tag(text: str, tags: tuple[str, ...]) -> tuple[str, str | None, str]:
    """Text before the first tag, the tag, and the text behind it.

    Without a tag: the text that is certainly none, None, and the end of the text that a tag may begin with.
    """
    if not tags:
        return text, None, ""
    found = _pattern(tags).search(text)
    if found is not None:
        return text[: found.start()], found[0], text[found.end() :]
    cut = len(text) - num_held(text, tags)
    return text[:cut], None, text[cut:]


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that is a beginning of a tag."""
    longest = max(map(len, tags), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


def is_remnant(held: str, is_cut: bool) -> bool:
    """Whether a beginning of a tag, at which the text ended, was meant as a tag: a lone ``<`` may be prose.

    Args:
        held: the beginning.
        is_cut: a limit has ended the text, so that more of the tag may have been about to come.
    """
    return len(held) >= (_CUT_REMNANT_CHARS if is_cut else _REMNANT_CHARS)


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
