"""Decides whether strings have a pattern or a format, as far as all validators agree."""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress

from attrs import define, field, frozen

from enginehouse_llguidance.formats import FOREIGN_TEXTS, STRING_FORMATS
from enginehouse_llguidance.patterns import AutomatonError, Expression, PatternError, expression_of
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

    narrow: Expression
    wide: Expression | None
    is_agreed: bool  # on all texts; otherwise on printable ASCII


@define(eq=False)
class Texts:
    """Patterns and formats, read when they are first asked for."""

    known: dict[str, _Known] = field(factory=dict)
    num_nodes: int = 0

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
                expression, depends = expression_of(pattern, is_widened=False)
            except PatternError as error:
                raise SchemaProblem(pointer, str(error)) from error
            narrow, wide = Expression(expression), None
            if depends:
                with suppress(PatternError, AutomatonError):
                    wide = Expression(expression_of(pattern, is_widened=True)[0])
            self.num_nodes += narrow.size + (0 if wide is None else wide.size)
            self.known[pattern] = _Known(narrow, wide, not depends)
        return self.known[pattern]

    def matches(self, pattern: str, text: str) -> bool | None:
        """Return True if a pattern is found in a text, None if that depends on the dialect.

        Raises as :meth:`read`, and TooLarge.
        """
        known = self.read(pattern)
        try:
            found = known.narrow.matches(text)
            if found or known.is_agreed or (text.isascii() and text.isprintable()):
                return found
            is_foreign = known.wide is not None and "\n" not in text and not known.wide.matches(text)
        except AutomatonError as error:
            raise TooLarge(
                "a string is too long to be matched; limit its length, for example with maxLength"
            ) from error
        return False if is_foreign else None

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
