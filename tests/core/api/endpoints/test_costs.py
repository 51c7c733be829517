"""Requests that would cost a multiple of their bytes are refused by name; what is large and plain is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginehouse.contract.fields import MAX_STOP_CHARS

from .conftest import CONTEXT, Endpoints

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stop", ["x" * (MAX_STOP_CHARS + 1), ["a", "x" * 1_000_000]])
def test_stop_strings_are_bounded(fake: Endpoints, stop: Any) -> None:
    """Each character is a state of the search, which a worker keeps for the next request."""
    error = fake.refusal("/v1/chat/completions", messages=MESSAGES, stop=stop)

    assert error["param"] == "stop"
    assert f"at most {MAX_STOP_CHARS} characters" in error["message"]
    assert fake.answer("/v1/chat/completions", messages=MESSAGES, stop="x" * MAX_STOP_CHARS, max_tokens=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_choice", ["x" * 150_000]),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 150_000}}}),
        ("logit_bias", {str(token_id): 1 for token_id in range(1100)}),
    ],
)
def test_what_many_prompts_share_is_bounded(fake: Endpoints, field: str, value: Any) -> None:
    error = fake.refusal("/v1/completions", prompt=["a"] * 120, max_tokens=1, **{field: value})

    assert error["param"].startswith(field)
    assert "with 120 prompts" in error["message"]


def test_long_names_are_compared_with_nothing(fake: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint is for who has misspelt a name, and looking for one takes time for each character."""

    def compare(*_: Any, **__: Any) -> None:
        raise AssertionError("compared")

    monkeypatch.setattr("enginehouse.settings.structuring.get_close_matches", compare)
    error = fake.refusal("/v1/chat/completions", messages=MESSAGES, samplers=["temperatur" * 1000])

    assert error["param"] == "samplers"
    assert "no such step" in error["message"]


@pytest.mark.llguidance
def test_prompts_share_what_they_have_in_common(fake: Endpoints) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}
    answer = fake.complete(prompt=["a", "b", "c"], response_format=schema, logit_bias={"5": -1}, max_tokens=20)

    assert [json.loads(choice["text"]) for choice in answer["choices"]] == ["yes"] * 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_predictions_are_no_longer_than_an_answer_may_be(fake: Endpoints) -> None:
    def body(text: str) -> dict[str, Any]:
        return {"messages": MESSAGES, "prediction": {"type": "content", "content": text}, "max_tokens": 1}

    error = fake.refusal("/v1/chat/completions", **body("word " * CONTEXT))

    assert error["param"] == "prediction"
    assert f"at most {CONTEXT} tokens" in error["message"]
    assert fake.answer("/v1/chat/completions", **body("word " * 10))
