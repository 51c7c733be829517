"""Regular expressions that end a text: parsed, and searched for character by character in linear time.

Used to check request fields, and by the engine for each character of an answer. The syntax is that of Python's ``re``
without what needs text that does not exist yet (``$``, ``\\b``, lookarounds) or unbounded time (backreferences). Single
characters are judged by ``re`` itself, so that classes, categories and flags mean the same.

A search follows all alternatives at once, so that its time per character is bounded by the size of the expression,
and it is in the same state however the text was split.

Source: K. Thompson, "Regular expression search algorithm" (1968); R. Pike's simulation, in which each state keeps the
beginning of its match: https://swtch.com/~rsc/regexp/regexp2.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from attrs import define, frozen

from enginehouse.contract.errors import quoted

__all__ = ["MAX_PATTERN_CHARS", "PatternSearch", "StopPatterns", "stop_patterns"]

MAX_PATTERN_CHARS = 1000
"""Maximum length of one expression, and of the matched text that is held back and left out."""
_MAX_NODES = 500
_MAX_DEPTH = 50

_Test = Callable[[str], object] | str
"""The characters that a node takes: one character, or a function that is true for them."""


@frozen
class _Char:
    test: _Test


@frozen
class _Assertion:
    """The beginning of the text, or with ``is_line`` also that of a line."""

    is_line: bool


@frozen
class _Chain:
    parts: tuple[_Part, ...]


@frozen
class _Choice:
    options: tuple[_Part, ...]


@frozen
class _Repeat:
    part: _Part
    least: int
    most: int | None


_Part = _Char | _Assertion | _Chain | _Choice | _Repeat

_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|.)", re.ASCII | re.DOTALL
)
_BRACES = re.compile(r"\{(?:(\d+)(?:(,)(\d*))?|(,)(\d*))\}", re.ASCII)
_FLAGS = re.compile(r"\(\?([imsau]*)(?:-([ims]+))?([:)])", re.ASCII)
_NAME = re.compile(r"\(\?P<\w+>")
_COMMENT = re.compile(r"\(\?#[^)]*\)")
_FLAG_VALUES = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "a": re.ASCII, "u": re.UNICODE}
_ALPHABETS = re.ASCII | re.UNICODE
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_DOUBTFUL = re.compile(r"(\\.)|([\[&~|])", re.DOTALL)  # characters that a later version of ``re`` may read otherwise


class _Parser:
    """Reads one expression. Raises ValueError with what is wrong with it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0

    def parse(self) -> _Part:
        """Return the expression."""
        flags = 0
        start = _FLAGS.match(self._pattern)
        if start is not None and start[1] and start[3] == ")" and start[2] is None:
            flags, self._place = self._flags(start[1]), start.end()
        part = self._choice(flags)
        if self._place < len(self._pattern):
            raise ValueError("a ')' closes nothing")
        return part

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._pattern, self._place)
        if found is not None:
            self._place = found.end()
        return found

    @staticmethod
    def _flags(letters: str) -> int:
        flags = 0
        for letter in letters:
            flags |= _FLAG_VALUES[letter]
        return flags

    def _choice(self, flags: int) -> _Part:
        options = [self._chain(flags)]
        while self._peek() == "|":
            self._place += 1
            options.append(self._chain(flags))
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _chain(self, flags: int) -> _Part:
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            if self._take(_COMMENT) is None:
                parts.append(self._repeated(self._atom(flags)))
        return _Chain(tuple(parts))

    def _repeated(self, part: _Part) -> _Part:
        bounds = self._bounds()
        if bounds is None:
            return part
        if self._peek() == "?":
            self._place += 1  # a text ends at the first match, so that every repetition is as short as it can be
        elif self._peek() == "+":
            raise ValueError("possessive repetitions such as 'a++' are not supported")
        if isinstance(part, _Assertion) or self._bounds() is not None:
            raise ValueError("a repetition must follow something to repeat")
        return _Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Return the numbers of a repetition that begins here; None if there is none."""
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if simple is not None:
            self._place += 1
            return simple
        found = self._take(_BRACES)
        if found is None:
            return None
        least = int(found[1] or 0)
        if max(least, int(found[3] or found[5] or 0)) > _MAX_NODES:
            raise ValueError(f"{quoted(found[0], 20)} repeats more than {_MAX_NODES} times")
        most = least if found[1] and not found[2] else (int(found[3] or found[5]) if found[3] or found[5] else None)
        if most is not None and most < least:
            raise ValueError(f"{found[0]!r} repeats at most less often than at least")
        if most == 0:  # parts that are never built would be read, which takes time, and not be counted
            raise ValueError(f"{found[0]!r} allows nothing of what it follows; leave both out")
        return least, most

    def _atom(self, flags: int) -> _Part:
        char = self._peek()
        if char == "(":
            return self._group(flags)
        if char == "[":
            return self._class(flags)
        if char == "\\":
            return self._escape(flags)
        if char in ("*", "+", "?"):
            raise ValueError("a repetition must follow something to repeat")
        self._place += 1
        if char == "^":
            return _Assertion(is_line=bool(flags & re.MULTILINE))
        if char == "$":
            raise ValueError("'$' is not supported: whether more text follows is not known")
        if char == "." or flags & re.IGNORECASE:
            return _Char(re.compile(char if char == "." else re.escape(char), flags).match)
        return _Char(char)

    def _group(self, flags: int) -> _Part:
        if self._pattern.startswith("(?", self._place):
            scoped = self._take(_FLAGS)
            if scoped is not None:
                if scoped[3] == ")":
                    raise ValueError("flags such as '(?i)' must begin the expression")
                added = self._flags(scoped[1])
                replaced = _ALPHABETS if added & _ALPHABETS else 0
                flags = flags & ~replaced & ~self._flags(scoped[2] or "") | added
            elif self._take(_NAME) is None:
                found = quoted(self._pattern[self._place : self._place + 4])
                raise ValueError(f"{found}: lookarounds, backreferences, conditions, other flags are not supported")
        else:
            self._place += 1
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"groups are nested more than {_MAX_DEPTH} deep")
        part = self._choice(flags)
        self._depth -= 1
        if self._peek() != ")":
            raise ValueError("a '(' is not closed")
        self._place += 1
        return part

    def _class(self, flags: int) -> _Part:
        found = self._take(_CLASS)
        if found is None:
            raise ValueError("a '[' is not closed")
        if "--" in found[0]:
            raise ValueError(f"{quoted(found[0])}: write a hyphen as '\\-'")
        inner = _DOUBTFUL.sub(lambda one: one[1] or f"\\{one[2]}", found[0][1:-1])
        return _one_of(f"[{inner}]", flags)

    def _escape(self, flags: int) -> _Part:
        found = self._take(_ESCAPE)
        if found is None:
            raise ValueError("the expression ends with '\\'")
        letter = found[0][1]
        if letter == "A":
            return _Assertion(is_line=False)
        if letter in "bBZz":
            raise ValueError(f"{quoted(found[0])} is not supported: it depends on text that does not exist yet")
        if letter in "123456789":
            raise ValueError(f"{quoted(found[0])} is not supported: no backreferences")
        return _one_of(found[0], flags)


def _one_of(text: str, flags: int) -> _Char:
    try:
        return _Char(re.compile(text, flags).match)
    except (re.error, OverflowError) as error:
        raise ValueError(f"{quoted(text)}: {error}") from error


@define(eq=False)
class _Node:
    """A state. One with ``test`` takes a character; others are passed without one.

    Attributes:
        following: states that come next.
        is_line: passed at the beginning of the text only, or if true also at that of a line; None is always.
    """

    following: list[_Node]
    test: _Test | None = None
    is_line: bool | None = None


class StopPatterns:
    """All expressions of a request as one automaton; immutable, shared by its choices.

    Raises:
        ValueError: an expression is invalid, not supported, too large, or matches the empty text.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._num_nodes = 0
        self.end = _Node([])
        self.start = _Node([])
        for pattern in patterns:
            try:
                if len(pattern) > MAX_PATTERN_CHARS:
                    raise ValueError(f"has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are allowed")
                first = self._build(_Parser(pattern).parse(), self.end)
                if self.end in _reach([first], set(), at_text=True, at_line=True):
                    raise ValueError("matches the empty text")
            except ValueError as error:
                raise ValueError(f"{quoted(pattern)}: {error}") from error
            self.start.following.append(first)

    def _add(self, following: list[_Node], test: _Test | None = None, is_line: bool | None = None) -> _Node:
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise ValueError(f"too large: all expressions together may have {_MAX_NODES} parts, repeated ones counted")
        return _Node(following, test, is_line)

    def _build(self, part: _Part, then: _Node) -> _Node:
        """Return the state that begins ``part``, after which ``then`` follows. Each call adds a state at least."""
        match part:
            case _Char(test):
                return self._add([then], test)
            case _Assertion(is_line):
                return self._add([then], is_line=is_line)
            case _Choice(options):
                return self._add([self._build(option, then) for option in options])
            case _Chain(parts):
                then = self._add([then])
                for one in reversed(parts):
                    then = self._build(one, then)
                return then
            case _Repeat(inner, least, most):
                then = self._add([then])
                if most is None:
                    then.following.append(self._build(inner, then))
                for _ in range(0 if most is None else most - least):
                    then = self._add([self._build(inner, then), then])
                for _ in range(least):
                    then = self._build(inner, then)
                return then


def _reach(nodes: Iterable[_Node], seen: set[_Node], *, at_text: bool, at_line: bool) -> list[_Node]:
    """Return the states that take a character, and the end, as far as they are reached from ``nodes`` without one.

    Args:
        seen: states that are reached already, which are left out; those that are reached now are added.
    """
    found, waiting = [], [*nodes]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.test is not None or not node.following:
            found.append(node)
        elif node.is_line is None or at_text or (node.is_line and at_line):
            waiting += node.following
    return found


@lru_cache(maxsize=64)
def stop_patterns(patterns: tuple[str, ...]) -> StopPatterns:
    """Return the automaton of ``patterns``, shared by requests with equal ones. Raises ValueError."""
    return StopPatterns(patterns)


class PatternSearch:
    """The search in one text, which comes in parts."""

    __slots__ = ("_first", "_num_read", "_patterns", "_threads", "_was_newline")

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._first = {
            at: tuple(_reach([patterns.start], set(), at_text=at == "text", at_line=at != ""))
            for at in ("text", "line", "")
        }
        self.reset()

    def reset(self) -> None:
        """Begin a new text."""
        self._num_read = 0
        self._was_newline = False
        # States that take the next character, each with the place where its match begins, in the order of these places.
        self._threads: list[tuple[_Node, int]] = []

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be part of a match."""
        return min(self._num_read - self._threads[0][1], MAX_PATTERN_CHARS) if self._threads else 0

    def scan(self, text: str) -> tuple[int, int]:
        """Read ``text`` up to the end of the first match in it.

        The match that is complete first wins; of several that end with the same character, the longest.

        Returns:
            The number of characters read, and the length of the match, at most :data:`MAX_PATTERN_CHARS`, or 0 after
            all of ``text``.
        """
        for num_read, char in enumerate(text, 1):
            began = self._read(char)
            if began is not None:
                return num_read, min(self._num_read - began, MAX_PATTERN_CHARS)
        return len(text), 0

    def _read(self, char: str) -> int | None:
        """Read a character; returns the place where the match begins that it completes, if it does."""
        here = self._num_read
        self._num_read += 1
        first = self._first["" if here and not self._was_newline else "line" if here else "text"]
        self._was_newline = at_line = char == "\n"
        threads, seen = [], set[_Node]()
        for node, began in (*self._threads, *((node, here) for node in first)):
            test = node.test
            if not (char == test if isinstance(test, str) else test is not None and test(char)):
                continue
            for reached in _reach(node.following, seen, at_text=False, at_line=at_line):
                if reached is self._patterns.end:
                    return began  # threads are in the order of their beginnings
                threads.append((reached, began))
        self._threads = threads
        return None
