"""``return_token_ids``: the ids of the prompt and of each choice, as vLLM reports them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Endpoints

CHAT = {"messages": [{"role": "user", "content": "Count to three."}]}
ASKED = {"return_token_ids": True, "max_tokens": 12, "temperature": 0, "seed": 1}


def chunks(server: Endpoints, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that have choices."""
    *lines, _ = server.stream(path, **body)
    return [chunk for chunk in map(json.loads, lines) if chunk["choices"]]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["e"]}, {"logprobs": 1}, {"echo": True}], ids=str)
def test_completions_have_them_in_choices(model: Endpoints, more: dict[str, Any]) -> None:
    body = {"prompt": "One, two,", **ASKED, **more}
    whole = model.complete(**body)
    streamed = [chunk["choices"][0] for chunk in chunks(model, "/v1/completions", **body)]
    prompt = model.tokens(prompt="One, two,")

    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [part for part in streamed if part["index"] == choice["index"] and "token_ids" in part]
        assert choice["prompt_token_ids"] == parts[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in part for part in parts[1:])
        assert [one for part in parts for one in part["token_ids"]] == choice["token_ids"]


def test_each_prompt_has_its_own(fake: Endpoints) -> None:
    choices = fake.complete(prompt=["ab", "cde"], **ASKED)["choices"]

    assert [choice["prompt_token_ids"] for choice in choices] == [fake.tokens(prompt=text) for text in ("ab", "cde")]


@pytest.mark.parametrize(
    "more", [{}, {"n": 2}, {"logprobs": True}, {"stream_options": {"include_usage": True}}], ids=str
)
def test_chats_have_those_of_the_prompt_outside(model: Endpoints, more: dict[str, Any]) -> None:
    body = {**CHAT, **ASKED, **more}
    whole = model.answer("/v1/chat/completions", **{**body, "stream_options": None})
    first, *others = chunks(model, "/v1/chat/completions", **body)

    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == model.tokens(**CHAT)
    assert not any("prompt_token_ids" in chunk for chunk in others)
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in others if chunk["choices"][0]["index"] == choice["index"]]
        assert [one for part in parts for one in part.get("token_ids", ())] == choice["token_ids"]


def test_tokens_without_text_are_listed(scripted: Endpoints) -> None:
    """Those of a stop string end the list, with the finish reason."""
    body = {**CHAT, "stop": [" wo"], "return_token_ids": True}
    whole = scripted.answer("/v1/chat/completions", **body)
    *_, last = chunks(scripted, "/v1/chat/completions", **body)

    assert whole["choices"][0]["message"]["content"] == "Hello"
    assert whole["choices"][0]["token_ids"] == [256, 257, 258]
    assert last["choices"][0]["token_ids"] == [258] and last["choices"][0]["finish_reason"] == "stop"


def test_nothing_is_listed_unasked(fake: Endpoints) -> None:
    body = {"prompt": "a", "max_tokens": 2}

    assert "token_ids" not in json.dumps([fake.complete(**body), *fake.stream("/v1/completions", **body)])
