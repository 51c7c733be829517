"""Arguments of calls: what is sent in parts is a JSON object, whatever the model writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse_anthropic.partial_json import PartialObject

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
OBJECTS = st.dictionaries(
    st.text(), st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
)


def sent(text: str, num_chars: int = 1) -> tuple[str, Any]:
    """The parts together, and the value."""
    arguments = PartialObject()
    parts = [arguments.push(text[at : at + num_chars]) for at in range(0, len(text), num_chars)]
    parts.append(arguments.finish())
    return "".join(parts), arguments.value()


@settings(max_examples=50)
@given(OBJECTS, st.booleans(), st.integers(1, 7), st.sampled_from([None, 1]))
def test_a_valid_object_is_sent_as_it_is(
    value: dict[str, Any], ascii_only: bool, size: int, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)

    assert sent(text, size) == (text, value)


@settings(max_examples=50)
@given(OBJECTS, st.data())
def test_what_is_cut_or_damaged_stays_an_object(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from(["", '"', "{", "]", ",", ":", "\\", "\\ud800", "1", "x", "\n"]))
    damaged += text[at + 1 :] if data.draw(st.booleans()) else ""

    parts, result = sent(damaged)

    assert json.loads(parts) == result and isinstance(result, dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("no object", {}),
        ("[1]", {}),
        ('{"path": "a.py", "text": "one\ntwo', {"path": "a.py", "text": "one\ntwo"}),
        ('{"path": "a.py", "tex', {"path": "a.py"}),
        ('{"size": 12', {}),
        ('{"size": 12}', {"size": 12}),
        ('{"list": [1, 2', {"list": [1]}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 01}', {}),
        ('{"a": "\\ud83d', {"a": ""}),
        ('{"a": {"b": 1}} and so on', {"a": {"b": 1}}),
        ("[" * 5000, {}),
        ('{"a":' * 5000, None),
    ],
)
def test_what_is_wrong_is_left_out(text: str, expected: Any) -> None:
    parts, result = sent(text, 100)

    assert json.loads(parts) == result
    assert expected is None or result == expected
