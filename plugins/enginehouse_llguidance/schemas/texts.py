"""Decides whether strings have a pattern or a format, as far as all validators agree."""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

from enginehouse_llguidance.formats import FOREIGN_TEXTS, STRING_FORMATS
from enginehouse_llguidance.patterns import AutomatonError, Backtracker, Expression, PatternError, matcher_of
from enginehouse_llguidance.schemas.problems import SchemaProblem

__all__ = ["Texts", "TooLarge", "Undecided", "in_ascii"]

_CATEGORY = re.compile(r"\\([pP])\{(\w+)\}")
_MAX_NODES = 200_000  # of all automata: a second
_FORMATS = {name: re.compile(expression) for name, expression in STRING_FORMATS.items()}


class TooLarge(ValueError):
    """A value has too many parts to be evaluated, or one that is too long for an expression."""


class Undecided(Exception):
    """Validators disagree on a string, so that no answer may depend on it."""


@frozen(eq=False)
class _Known:
    """A pattern: what all validators match, and what any of them may match; None if it is not known."""

    narrow: Expression | Backtracker
    wide: Expression | Backtracker | None
    depends: bool  # dialects disagree on the characters of classes, beyond printable ASCII

    @property
    def is_monotone(self) -> bool:
        return not isinstance(self.narrow, Backtracker) or self.narrow.is_monotone


@define(eq=False)
class Texts:
    """Patterns and formats, read when they are first asked for.

    Attributes:
        num_states: states that searches for expressions with back-references have tried.
    """

    known: dict[str, _Known] = field(factory=dict)
    num_nodes: int = 0
    num_states: int = 0

    def read(self, pattern: str, pointer: str = "") -> _Known:
        """Translate a pattern.

        Raises:
            SchemaProblem: it is malformed or not supported.
            AutomatonError: it is too large.
        """
        if pattern not in self.known:
            if self.num_nodes > _MAX_NODES:
                raise AutomatonError("the expressions that are checked are too large together")
            try:
                narrow, depends = matcher_of(pattern, is_widened=False)
            except PatternError as error:
                raise SchemaProblem(pointer, str(error)) from error
            wide = None
            if depends or isinstance(narrow, Backtracker):
                with suppress(PatternError, AutomatonError):
                    wide = matcher_of(pattern, is_widened=True)[0]
            self.num_nodes += narrow.size + (0 if wide is None else wide.size)
            self.known[pattern] = _Known(narrow, wide, depends)
        return self.known[pattern]

    def search_of(self, schema: dict[str, Any]) -> Backtracker | None:
        """Return the search for the pattern of a schema, if its matches depend on one."""
        found = self.read(schema["pattern"]).narrow if "pattern" in schema else None
        return found if isinstance(found, Backtracker) else None

    def matches(self, pattern: str, text: str) -> bool | None:
        """Return True if a pattern is found in a text, None if that depends on the dialect.

        Raises as :meth:`read`, and TooLarge.
        """
        known, is_plain = self.read(pattern), text.isascii() and text.isprintable()
        try:
            found = self._is_found(known.narrow, text)
            if not isinstance(known.narrow, Backtracker) and (is_plain or not known.depends):
                return found
            if not is_plain and known.depends and not known.is_monotone:
                return None
            is_asked = not found and (is_plain or "\n" not in text)
            is_foreign = is_asked and not self._is_found(known.wide, text)
        except AutomatonError as error:
            raise TooLarge(
                "a string is too long to be matched; limit its length, for example with maxLength"
            ) from error
        return found or (False if is_foreign else None)

    def _is_found(self, matcher: Expression | Backtracker | None, text: str) -> bool:
        if matcher is None:
            return True
        found = matcher.matches(text)
        self.num_states += matcher.num_states if isinstance(matcher, Backtracker) else 0
        return found

    def has_format(self, name: str, text: str) -> bool | None:
        """Return True if a text is of a format, None if that depends on the validator; unknown formats allow all."""
        if name not in _FORMATS or _FORMATS[name].fullmatch(text):
            return True
        return False if name in FOREIGN_TEXTS and self.matches(FOREIGN_TEXTS[name], text) else None


def in_ascii(regex: str) -> str:
    """Return an expression without general categories, which matches the same texts of ASCII characters."""
    return _CATEGORY.sub(_ascii_members, regex)


def _ascii_members(category: re.Match[str]) -> str:
    """Return the members of a set that are in a general category, or outside it, and in ASCII."""
    is_inside = category[1] == "p"
    found = (code for code in range(128) if unicodedata.category(chr(code)).startswith(category[2]) == is_inside)
    return "".join(f"\\x{{{code:x}}}" for code in found)
