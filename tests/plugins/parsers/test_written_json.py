"""JSON of tools: the text that `json.dumps` would write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_parsers.written_json import written_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(VALUES)
def test_texts_are_those_of_the_standard_library(value: object) -> None:
    assert written_json(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("value", [0.5, -0.0, 1e300, 1e-7, {"a": "\ud800"}, ["\udfff", "ü"]])
def test_rare_values_are_written_too(value: object) -> None:
    assert json.loads(written_json(value)) == value
