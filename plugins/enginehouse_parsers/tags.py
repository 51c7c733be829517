"""Finds tags in streamed text, and the text that must be held back because a tag may be starting."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

__all__ = ["end_of_white", "is_remnant", "num_held", "split_at_tag", "token_at"]

_REMNANT_CHARS = 5
_CUT_REMNANT_CHARS = 2


_WHITE = re.compile(r"\s*+")
_JSON_WHITE = re.compile(r"[ \t\n\r]*+")
_SEPARATORS = re.compile(r"[ \t\n\r,;]*+")


def end_of_white(text: str, start: int, is_json: bool = True, *, has_separators: bool = False) -> int:
    """Return the position of the first character from ``start`` on that is not (JSON or any) white space.

    With ``has_separators`` commas and semicolons are skipped as well.

    Text that is held back is scanned again with each new piece; to avoid quadratic time, white space already seen is
    not scanned again.
    """
    run = _SEPARATORS if has_separators else _JSON_WHITE if is_json else _WHITE
    found = run.match(text, start)
    return start if found is None else found.end()


def split_at_tag(text: str, tags: tuple[str, ...]) -> tuple[str, str | None, str]:
    """Split into the text before the first tag, the tag, and the text after it.

    Without a tag: the text that certainly contains none, None, and the suffix that may start a tag.
    """
    if not tags:
        return text, None, ""
    found = _pattern(tags).search(text)
    if found is not None:
        start = _begin_of_longer(text, found.start(), tags)
        if start is not None:
            return text[:start], None, text[start:]
        return text[: found.start()], found[0], text[found.end() :]
    cut = len(text) - num_held(text, tags)
    return text[:cut], None, text[cut:]


def _begin_of_longer(text: str, found: int, tags: tuple[str, ...]) -> int | None:
    """Return where a tag may begin that is longer than the text, at or before the tag that was found; None if none."""
    longest = max(map(len, tags))
    for start in range(max(0, len(text) - longest + 1), found + 1):
        end = text[start:]
        if any(len(tag) > len(end) and tag.startswith(end) for tag in tags):
            return start
    return None


def token_at(text: str, position: int, tokens: Iterable[str], *, is_last: bool) -> str | None:
    """Return the longest of the tokens at a position: "" if there is none, None if the text may end inside one."""
    found = ""
    for token in tokens:
        if text.startswith(token, position):
            found = max(found, token, key=len)
        elif not is_last and token.startswith(text[position:]) and len(token) > len(found):
            return None
    return found


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of a tag."""
    longest = max(map(len, tags), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


def is_remnant(held: str, is_cut: bool) -> bool:
    """True if a tag prefix at the end of the text was meant as a tag: a lone ``<`` may be prose.

    Args:
        held: the prefix.
        is_cut: a limit ended the text, so the rest of the tag may have been cut off.
    """
    return len(held) >= (_CUT_REMNANT_CHARS if is_cut else _REMNANT_CHARS)


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
