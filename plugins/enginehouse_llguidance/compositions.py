"""Converts compositions (:mod:`enginehouse.contract.composition`) to the library's Lark dialect, one rule per part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from enginehouse.contract.composition import Composition, FreeText, InOrder, Marker, Matching, OneOf, Repeated, Text
from enginehouse.contract.types import Constraint

__all__ = ["grammar_of_composition"]


def grammar_of_composition(
    composition: Composition, control_tokens: Mapping[str, int], grammar_of: Callable[[Constraint], str]
) -> str:
    """Return the library's grammar.

    Args:
        composition: the whole answer.
        control_tokens: the model's control-token strings.
        grammar_of: returns a constraint's own grammar, as the library's JSON.
    """
    writer = _Writer(control_tokens, grammar_of)
    start = writer.write(composition)
    lark = "\n".join([f"start: {start}", *writer.rules, ""])
    return json.dumps({"grammars": [{"name": "composition", "lark_grammar": lark}, *writer.parts]})


class _Writer:
    """Collects rules, and the grammars of parts, which the rules reference with ``@``."""

    def __init__(self, control_tokens: Mapping[str, int], grammar_of: Callable[[Constraint], str]) -> None:
        self.rules: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self._control_tokens = control_tokens
        self._grammar_of = grammar_of

    def write(self, part: Composition) -> str:  # noqa: PLR0911 - one per kind of part
        """Return the expression for ``part`` in a rule."""
        match part:
            case Text(text):
                return _quoted(text)
            case Marker(text):
                return self._marker(text)
            case FreeText(until):
                return self._free(until)
            case Matching(constraint):
                return self._matching(constraint)
            case InOrder(parts):
                return self._rule(" ".join(map(self.write, parts)))
            case OneOf(parts):
                return self._rule(" | ".join(map(self.write, parts)))
            case Repeated(repeated, at_least, at_most):
                return self._rule(f"{self._rule(self.write(repeated))}{{{at_least},{at_most}}}")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _marker(self, text: str) -> str:
        token_id = self._control_tokens.get(text)
        return _quoted(text) if token_id is None else f"<[{token_id}]>"

    def _free(self, until: str | None) -> str:
        anything = "/(.|\\n)*/"
        if until is None:
            return self._rule(anything)
        if until in self._control_tokens:
            return self._rule(f"{anything} {self._marker(until)}")
        return self._rule(f"{anything} {_quoted(until)}", "[lazy]")

    def _matching(self, constraint: Constraint) -> str:
        (grammar,) = json.loads(self._grammar_of(constraint))["grammars"]
        name = f"matching_{len(self.parts)}"
        self.parts.append({**grammar, "name": name})
        return f"@{name}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
