"""Constraints of every kind, with texts that they allow and texts that they forbid."""

from __future__ import annotations

import json

from attrs import frozen

from enginehouse.contract.composition import InOrder, Matching, Repeated, Text, compose
from enginehouse.contract.types import Constraint, ConstraintKind

__all__ = ["EXAMPLES", "MALFORMED", "ConstraintExample"]


@frozen
class ConstraintExample:
    """A constraint, complete texts that it allows, and texts that are invalid or incomplete."""

    constraint: Constraint
    allowed: tuple[str, ...]
    forbidden: tuple[str, ...]


_NUMBERED = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["one", "two"]}},
    "required": ["n"],
    "additionalProperties": False,
}
_CHOICE = Constraint(kind="choice", text='["yes", "no", "maybe"]')

EXAMPLES: dict[ConstraintKind, ConstraintExample] = {
    "json_object": ConstraintExample(
        Constraint(kind="json_object"), ("{}", '{"a": 1}', '{"a": {"b": [null]}}'), ("[]", '{"a": }', "1", "{")
    ),
    "json_schema": ConstraintExample(
        Constraint(kind="json_schema", text=json.dumps(_NUMBERED)),
        ('{"n": 12}', '{"n": -1, "s": "two"}'),
        ("{}", '{"n": "x"}', '{"m": 1}', '{"n": 1', '{"n": 1, "s": "three"}'),
    ),
    "regex": ConstraintExample(
        Constraint(kind="regex", text="[ab]{2,3}c?é*"), ("ab", "abac", "bbcéé"), ("a", "abd", "xab", "ababb")
    ),
    "choice": ConstraintExample(_CHOICE, ("yes", "no", "maybe"), ("yesno", "n", "", "Yes")),
    "lark": ConstraintExample(
        Constraint(kind="lark", text='start: "a" NUMBER\nNUMBER: /[0-9]+/'), ("a1", "a12"), ("a", "b1", "1")
    ),
    "gbnf": ConstraintExample(Constraint(kind="gbnf", text='root ::= "a" [0-9]+'), ("a1", "a12"), ("a", "b1", "1")),
    "composition": ConstraintExample(
        compose(InOrder((Text("<"), Matching(_CHOICE), Repeated(Text("!"), 0, 2), Text(">"))), "tools"),
        ("<yes>", "<no!!>"),
        ("yes", "<yes", "<no!!!>", "<>"),
    ),
}

MALFORMED: dict[ConstraintKind, tuple[str, ...]] = {
    "json_schema": ("{", "3", '{"type": "nothing"}'),
    "regex": ("(", "[a"),
    "choice": ("[]", "[1]"),
    "lark": ("start: (", "no grammar"),
    "gbnf": ("root ::= (", "no grammar"),
}
"""Texts that are not valid constraints of their kind."""
