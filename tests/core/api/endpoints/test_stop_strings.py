"""``include_stop_str_in_output``: the stop string at the end of the text."""

from __future__ import annotations

import json

import pytest

from .conftest import Endpoints

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(("shown", "text"), [(False, "Hello"), (True, "Hello wo")])
def test_the_stop_string_is_shown_on_request(scripted: Endpoints, shown: bool, text: str) -> None:
    body = {"stop": [" wo"], "include_stop_str_in_output": shown}
    *chunks, _ = scripted.stream("/v1/chat/completions", **CHAT, **body)
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]

    assert scripted.answer("/v1/chat/completions", **CHAT, **body)["choices"][0]["message"]["content"] == text
    assert scripted.complete(prompt="Hi", **body)["choices"][0]["text"] == text
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


def test_an_answer_that_ends_otherwise_has_none(scripted: Endpoints) -> None:
    whole = scripted.complete(prompt="Hi", stop="x", include_stop_str_in_output=True)

    assert whole["choices"][0]["text"] == "Hello world"
