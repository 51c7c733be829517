"""Regular expressions: those of requests, translated to the library's dialect, and automata of both."""

from __future__ import annotations

from enginehouse_llguidance.patterns.automata import AutomatonError, Expression
from enginehouse_llguidance.patterns.backtracking import Backtracker
from enginehouse_llguidance.patterns.intersections import NothingMatches, limited_work, listed, restricted
from enginehouse_llguidance.patterns.reading import PatternError
from enginehouse_llguidance.patterns.translating import (
    ANY_TEXT,
    NO_TEXT,
    Pattern,
    escape_text,
    matcher_of,
    translate_pattern,
)

__all__ = [
    "ANY_TEXT",
    "NO_TEXT",
    "AutomatonError",
    "Backtracker",
    "Expression",
    "NothingMatches",
    "Pattern",
    "PatternError",
    "escape_text",
    "limited_work",
    "listed",
    "matcher_of",
    "restricted",
    "translate_pattern",
]
