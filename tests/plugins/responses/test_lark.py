"""Lark grammars as regular expressions, and those that are refused."""

from __future__ import annotations

import re

import pytest

from enginehouse_responses.lark import LarkProblem, regex_of_lark

from .harness import APPLY_PATCH

SUM = """
start: sum
sum: sum "+" term   // a list, written as a rule that refers to itself
   | term
?term.2: INT
    | "x"i~2..3
%import common.INT
%ignore " "
"""
LIST = """
start: "[" items "]"
items: item "," items | item
item: "a".."f" | WORD
WORD: "yes" | "no" | /[0-9]{2}/
"""


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (
            APPLY_PATCH,
            [
                "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch\n",
                "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ f\n-a\n+b\n c\n*** End of File\n*** End Patch",
                "*** Begin Patch\n*** Delete File: a\n*** Delete File: b\n*** End Patch\n",
            ],
            [
                "",
                "*** Begin Patch\n*** End Patch\n",
                "*** Begin Patch\n*** Add File: a.py\nx\n*** End Patch\n",
                "*** Begin Patch\n*** Delete File: \n*** End Patch\n",
            ],
        ),
        (SUM, ["1", "1+2", " 1 + 23 +xX", "xxx + 1 "], ["", "+1", "1+", "x", "1 2"]),
        (LIST, ["[a]", "[a,yes,42]"], ["[]", "[g]", "[a,]", "[4]"]),
        ('start: "(" ("a" | "b")* ")" ["\\n" "\\u00fc" "\\\\"]', ["()", "(abba)", "(a)\nü\\"], ["(", "(c)", "()\n"]),
    ],
)
def test_a_regular_grammar_becomes_an_expression(grammar: str, matching: list[str], others: list[str]) -> None:
    expression = re.compile(regex_of_lark(grammar, 10_000))

    assert [text for text in matching if not expression.fullmatch(text)] == []
    assert [text for text in others if expression.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "(" start ")" | "a"', "'start' refers to itself"),
        ('start: a\na: b "x" | "y"\nb: a', "'a' refers to itself"),
        ('start: start "a"', "never ends"),
        ("start: missing", "unknown rule 'missing'"),
        ('other: "a"', "unknown rule 'start'"),
        ('start: "a', "line 1: cannot read"),
        ('start: "a"\n\nstart: "b"', "'start' is defined twice"),
        ("start: /a/s", "the flags 's'"),
        ('start{a}: "a"', "parameters"),
        ("start: A\n%import common.NOTHING", "common.NOTHING"),
        ("start: A\n%import python.NAME", "only 'common'"),
        ('start: "a"\n%declare X', "%declare"),
        ('start: ("a"', "unbalanced"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested"),
        ('start: a0\na100: "a"\n' + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(100)), "more than"),
        ("start: a0\n" + "\n".join(f'a{n}: a{n + 1} | "x"' for n in range(300)), "more than"),
        ("start: " + '"a" ' * 6000, "5000 tokens"),
    ],
)
def test_other_grammars_are_refused_with_their_problem(grammar: str, problem: str) -> None:
    with pytest.raises(LarkProblem, match=re.escape(problem)):
        regex_of_lark(grammar, 10_000)
