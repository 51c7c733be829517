"""Regular expressions that end a text: what is refused, and that no expression takes more than linear time."""

from __future__ import annotations

import pytest

from enginehouse.contract.stop_patterns import PatternSearch, StopPatterns


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "a '(' is not closed"),
        ("a)", "a ')' closes nothing"),
        ("[a", "a '[' is not closed"),
        ("*a", "must follow something"),
        ("a**", "must follow something"),
        ("^*a", "must follow something"),
        ("a$", "'$' is not supported"),
        (r"\bx", "does not exist yet"),
        ("(?=a)b", "lookarounds"),
        (r"(a)\1", "no backreferences"),
        ("a++", "possessive"),
        ("a(?i)b", "must begin the expression"),
        ("[b-a]", "bad character range"),
        ("[a--b]", "hyphen"),
        (r"\q", "bad escape"),
        ("\\", "ends with"),
        ("x{5,2}", "repeats at most less often"),
        ("a*", "matches the empty text"),
        ("^", "matches the empty text"),
        ("a{501}", "more than 500 times"),
        ("((){400}){400}x", "too large"),
        ("(" * 60 + "a" + ")" * 60, "nested"),
        ("a" * 1001, "has 1001 characters"),
    ],
)
def test_an_expression_is_refused_with_the_reason(pattern: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^'") as refused:
        StopPatterns((pattern,))

    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("[[&|~a]b", "x&b", "&b"),
        ("a{,2}c", "aac", "aac"),
        ("a{x", "a{x", "a{x"),
        ("(?P<name>a)(?:b)(?#no)c", "abc", "abc"),
        ("(?i:A)B", "aB", "aB"),
        ("(?i)(?s-i:A)b", "aAB", "AB"),
        (r"\x41\u0042\N{BULLET}\.", "AB\u2022.", "AB\u2022."),
        (r"\A\d+", "12", "1"),
        ("(?m)^b", "ab\nb", "b"),
        ("[^]a]+?x", "]bx", "bx"),
        (r"(?a)\w", "éa", "a"),
    ],
)
def test_the_syntax_is_that_of_re(pattern: str, text: str, found: str) -> None:
    num_read, length = PatternSearch(StopPatterns((pattern,))).scan(text)

    assert text[num_read - length : num_read] == found


@pytest.mark.parametrize("pattern", ["(a+)+(a+)+b", "(a|aa)+b", "(a?){80}a{80}b", "(.*)*(.*)*b"])
def test_no_expression_takes_more_than_linear_time(pattern: str) -> None:
    """Backtracking would take longer than any test may."""
    assert PatternSearch(StopPatterns((pattern,))).scan("a" * 3000) == (3000, 0)
