"""Follows the text of a composition up to the JSON values in it, which have rules; see ``following`` for these.

A text may be read in several ways: one thread each. It is wrong when a wrong value has ended every thread. Parts other
than JSON, searched and fixed text are not distinguished from any other text. A whole answer of JSON is a composition of
one part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from attrs import frozen

from enginehouse.contract.composition import Composition, FreeText, InOrder, Marker, Matching, OneOf, Repeated, Text
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.following import START, JsonState, WrongValue, check_whole, follow, held_from, next_of
from enginehouse_llguidance.schemas.texts import Texts
from enginehouse_llguidance.schemas.validation import Rules

__all__ = ["Follower", "Part", "SearchedText", "Thread", "Value", "part_of"]

_MAX_THREADS = 200


@frozen(eq=False)
class Value:
    """A JSON value."""

    rules: Rules


class SearchedText:
    """A text that an expression matches, of which the grammar allows more.

    Args:
        pattern: matches the whole text.

    Raises:
        AutomatonError: it is too large.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern, self._texts = f"^(?:{pattern})$", Texts()
        self._search = self._texts.search_of({"pattern": self._pattern})

    def check(self, text: bytearray, begin: int, end: int, until: bytes = b"") -> None:
        """Check a text that ends before ``until``.

        Raises:
            WrongValue: it does not match.
            TooLarge: the search takes too long.
        """
        self._texts.num_states = 0
        if self._texts.matches(self._pattern, text[begin:end].decode("utf-8", "replace")) is not True:
            raise WrongValue(bytes(text[: end + len(until)]), num_evaluated=self._texts.num_states)

    def next_of(self, text: bytearray, begin: int, until: bytes) -> list[bytes] | None:
        """Return texts, one of which the rest begins, or begins with; None if that is not known."""
        written = bytes(text[begin:])
        if self._search is None or any(written.endswith(until[:size]) for size in range(1, len(until))):
            return None
        following = self._search.following(written.decode("utf-8", "replace"))
        return [one.encode() or until for one in following] if following else None


class _Any(NamedTuple):
    """Any text, up to the end of the first occurrence of ``until``.

    If that is empty, up to the fixed text that follows, or to anywhere where none does.
    """

    until: bytes


class _Choice(NamedTuple):
    options: tuple[tuple[Part, ...], ...]


class _Repeated(NamedTuple):
    parts: tuple[Part, ...]
    at_least: int
    at_most: int


Part = bytes | Value | SearchedText | _Any | _Choice | _Repeated


def part_of(
    composition: Composition, value_of: Callable[[Constraint], Value | SearchedText | None]
) -> tuple[Part, ...]:
    """Convert a composition.

    Args:
        value_of: returns the JSON value of a part, or None if it is another text.
    """
    match composition:
        case Text(text) | Marker(text):
            return (text.encode(),)
        case FreeText(until):
            return (_Any((until or "").encode()),)
        case Matching(constraint):
            return (value_of(constraint) or _Any(b""),)
        case InOrder(parts):
            return tuple(one for part in parts for one in part_of(part, value_of))
        case OneOf(parts):
            return (_Choice(tuple(part_of(part, value_of) for part in parts)),)
        case Repeated(part, at_least, at_most):
            return (_Repeated(part_of(part, value_of), at_least, at_most),)


class Thread(NamedTuple):
    """One way to read the text so far.

    Attributes:
        left: the parts that follow; the first one may be partial.
        begin: index where the first one begins, if it is any text.
        state: within a JSON value, which is the first one.
    """

    left: tuple[Part, ...]
    begin: int = 0
    state: JsonState | None = None


class Follower:
    """The text that a grammar allows."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.start = frozenset({Thread(parts)})

    def follow(  # noqa: PLR0912 - one per part
        self, threads: frozenset[Thread], text: bytearray, begin: int
    ) -> frozenset[Thread]:
        """Return the threads after a text of which the first ``begin`` bytes were followed before.

        Raises:
            WrongValue: a value that is now complete.
            ValueError: the text has too many readings, or none.
        """
        found: set[Thread] = set()
        seen: set[tuple[Thread, int]] = set()
        wrong: list[bytes] = []
        num_evaluated = 0
        waiting = [(thread, begin) for thread in threads]
        while waiting:
            thread, index = waiting.pop()
            if (thread, index) in seen:
                continue
            seen.add((thread, index))
            if not thread.left:
                if index == len(text):
                    found.add(thread)
                continue
            first = thread.left[0]
            if isinstance(first, Value):
                try:
                    state, reached = follow(thread.state or START, text, index, first.rules)
                except WrongValue as error:
                    wrong += error.beginnings
                    num_evaluated += error.num_evaluated
                    continue
                if state.is_complete:
                    waiting.append((Thread(thread.left[1:], reached), reached))
                if not state.is_complete or reached == len(text):
                    found.add(thread._replace(state=state))
            elif index == len(text) and not isinstance(first, _Choice | _Repeated):
                found.add(thread)
                if first == _Any(b"") and not _until(thread.left[1:]):
                    waiting.append((Thread(thread.left[1:], index), index))
            else:
                try:
                    waiting += _after(thread, text, index)
                except WrongValue as error:
                    wrong += error.beginnings
                    num_evaluated += error.num_evaluated
            if len(seen) > _MAX_THREADS * (1 + len(text) - begin):
                raise ValueError("the text has too many readings")
        if not found:
            if wrong:
                raise WrongValue(*dict.fromkeys(wrong), num_evaluated=num_evaluated)
            raise ValueError("the text has no reading")
        return frozenset(found)

    def end(self, threads: frozenset[Thread], text: bytearray) -> None:
        """Check what the end of the text completes.

        Raises:
            WrongValue: all of it is wrong.
        """
        wrong: WrongValue | None = None
        for thread in threads:
            first = thread.left[0] if thread.left else b""
            try:
                if isinstance(first, SearchedText):
                    first.check(text, thread.begin, len(text))
                elif isinstance(first, Value) and thread.state is not None:
                    check_whole(thread.state, text, first.rules)
            except WrongValue as error:
                wrong = error
            else:
                return
        if wrong is not None:
            raise wrong

    def next_of(self, threads: frozenset[Thread], text: bytearray) -> list[bytes] | None:
        """Return texts, one of which the rest begins, or begins with; None if that is not known."""
        found: list[bytes] = []
        for thread in threads:
            first, of_thread = thread.left[0] if thread.left else None, None
            if isinstance(first, SearchedText):
                of_thread = first.next_of(text, thread.begin, _until(thread.left[1:]))
            elif isinstance(first, Value) and thread.state is not None:
                of_thread = next_of(thread.state, text, first.rules)
            if of_thread is None:
                return None
            found += of_thread
        return found

    def held_from(self, threads: frozenset[Thread], size: int) -> int | None:
        """Return the index from which a text of ``size`` bytes may still turn out wrong; None if all of it is final."""
        found = [
            begin
            for thread in threads
            if thread.state is not None and isinstance(first := thread.left[0], Value)
            for begin in (held_from(thread.state, size, first.rules),)
            if begin is not None
        ]
        found += [thread.begin for thread in threads if thread.left and isinstance(thread.left[0], SearchedText)]
        return min(found, default=None)


def _after(  # noqa: PLR0911 - one per part
    thread: Thread, text: bytearray, index: int
) -> list[tuple[Thread, int]]:
    """Return the threads after the next byte, or what they may begin with there."""
    first, rest = thread.left[0], thread.left[1:]
    if isinstance(first, bytes):
        size = min(len(first), len(text) - index)
        if not text.startswith(first[:size], index):
            return []
        left = (first[size:], *rest) if size < len(first) else rest
        return [(Thread(left, index + size), index + size)]
    if isinstance(first, _Any | SearchedText):
        own = first.until if isinstance(first, _Any) else b""
        until = own or _until(rest)
        if not until:
            return (
                [(thread, len(text))]
                if isinstance(first, SearchedText)
                else [
                    (Thread(rest, index), index),
                    (thread, index + 1),
                ]
            )
        end = text.find(until, max(thread.begin, index - len(until) + 1))
        if end < 0:
            return [(thread, len(text))]
        if isinstance(first, SearchedText):
            first.check(text, thread.begin, end, until)
        end += len(own)
        return [(Thread(rest, end), end)]
    if isinstance(first, _Choice):
        return [(Thread((*option, *rest), index), index) for option in first.options]
    assert isinstance(first, _Repeated)
    found = [(Thread(rest, index), index)] if first.at_least == 0 else []
    if first.at_most > 0:
        again = _Repeated(first.parts, max(0, first.at_least - 1), first.at_most - 1)
        found.append((Thread((*first.parts, again, *rest), index), index))
    return found


def _until(parts: tuple[Part, ...]) -> bytes:
    """Return the fixed text that parts begin with."""
    found = b""
    for part in parts:
        if not isinstance(part, bytes):
            break
        found += part
    return found
