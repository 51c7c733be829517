"""Regular expressions: those of requests, translated to the library's dialect, and automata of both."""

from __future__ import annotations

from enginehouse_llguidance.patterns.automata import AutomatonError, Expression
from enginehouse_llguidance.patterns.intersections import NothingMatches, limited_work, listed, restricted
from enginehouse_llguidance.patterns.reading import PatternError
from enginehouse_llguidance.patterns.translating import (
    ANY_TEXT,
    NO_TEXT,
    Pattern,
    escape_text,
    expression_of,
    translate_pattern,
)

__all__ = [
    "ANY_TEXT",
    "NO_TEXT",
    "AutomatonError",
    "Expression",
    "NothingMatches",
    "Pattern",
    "PatternError",
    "escape_text",
    "expression_of",
    "limited_work",
    "listed",
    "restricted",
    "translate_pattern",
]
