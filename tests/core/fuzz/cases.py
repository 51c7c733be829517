"""How many cases a check gets, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

__all__ = ["JSON", "NASTY_TEXT", "NUM_CASES", "run_cases", "some_members"]

NUM_CASES = pytest.mark.parametrize(
    "num_cases", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)

_SPLINTERS = (
    *(
        '"',
        "\\",
        "\n",
        "\r\n",
        "\0",
        "\u2028",
        "\x85",
        "\ud7ff",
        "\ufffd",
        "\U0010ffff",
        "e\u0301",
        "🧑🏽\u200d🚀",
        "\u202e",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "data: ",
        "{{",
        "%}",
    ),
    *("{", "}", "[", "]", ":", ",", "null", "-0", "1e400", "$ref", "#/$defs/a", "A" * 300),
)
NASTY_TEXT = st.lists(st.one_of(st.sampled_from(_SPLINTERS), st.text(max_size=8)), max_size=6).map("".join)
"""Text with what somewhere has a meaning; without halves of surrogate pairs."""

_NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, -(2**31), 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, 1e-7]),
    st.floats(allow_nan=False, allow_infinity=False),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, NASTY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NASTY_TEXT, inner, max_size=4)),
    max_leaves=12,
)
"""Any JSON value."""


@st.composite
def some_members(draw: st.DrawFn, members: dict[str, st.SearchStrategy[Any]], most: int) -> dict[str, Any]:
    """An object with a few of these members, in any order; drawing all of them would take long."""
    names = draw(st.lists(st.sampled_from(sorted(members)), max_size=most, unique=True))
    return {name: draw(members[name]) for name in names}


def run_cases(num_cases: int, check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with so many values of the strategies, the same in every run."""
    bounded = settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    bounded(given(**strategies)(check))()
