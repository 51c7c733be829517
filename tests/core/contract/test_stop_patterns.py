"""Regular expressions that end a text: the refused ones, matches like those of ``re``, and searches in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

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
        ("(?:ab){0}c", "leave both out"),
        ("(?)a", "must begin the expression"),
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


def test_a_message_shows_the_expression_as_it_was_sent() -> None:
    with pytest.raises(ValueError, match="not supported") as refused:
        StopPatterns((r"a\b",))

    assert str(refused.value).startswith(r"'a\b': '\b' is not supported")


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
        (r"(?a)(?u:\w)b", "éb", "éb"),
        ("(?i)(?-i:a)b", "AbaB", "aB"),
    ],
)
def test_the_syntax_is_that_of_re(pattern: str, text: str, found: str) -> None:
    num_read, length = PatternSearch(StopPatterns((pattern,))).scan(text)

    assert text[num_read - length : num_read] == found


CHARACTERS = "aAbs\n\u017f"  # s and the last one are equal under (?i)
_ATOMS = [*"abs", ".", "^", r"\A", r"\W", "[^a]", "[A-Zb]"]
_EXPRESSIONS = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.builds("{}{})".format, st.sampled_from(["(", "(?:", "(?i:", "(?m:", "(?s-i:", "(?a:"]), inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{,2}", "{2,}"])),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    patterns=st.lists(
        st.builds("{}{}".format, st.sampled_from(["", "(?i)", "(?m)"]), _EXPRESSIONS), min_size=1, max_size=2
    ),
    parts=st.lists(st.text(CHARACTERS, max_size=3), max_size=3),
)
@example(["a+b"], ["aa", "b"])
@example(["(?i)s"], ["\u017f"])
@example(["(?m)b\n^a"], ["b\n", "a"])
def test_search_in_parts_finds_the_first_match_that_re_finds(patterns: list[str], parts: list[str]) -> None:
    """The end that comes first, and the longest match that has it."""
    references = list(map(re.compile, patterns))
    assume(not any(reference.match("") or reference.search("a\n", 2) for reference in references))
    try:
        search = PatternSearch(StopPatterns(tuple(patterns)))
    except ValueError as error:
        assert "too large" in str(error)
        return
    text = "".join(parts)
    expected = next(
        (
            (end, end - start)
            for end in range(1, len(text) + 1)
            for start in range(end)
            if any(reference.fullmatch(text, start, end) for reference in references)
        ),
        (len(text), 0),
    )

    num_read = length = 0
    for part in parts:
        num_in_part, length = search.scan(part)
        num_read += num_in_part
        if length:
            break
    assert (num_read, length) == expected


@pytest.mark.parametrize("pattern", ["(a+)+(a+)+b", "(a|aa)+b", "(a?){80}a{80}b", "(.*)*(.*)*b"])
def test_no_expression_takes_more_than_linear_time(pattern: str) -> None:
    """Backtracking would take longer than any test may."""
    assert PatternSearch(StopPatterns((pattern,))).scan("a" * 3000) == (3000, 0)
