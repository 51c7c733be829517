"""The raw ``prompt`` of a chat request: a text that no template wraps, answered as a chat."""

from __future__ import annotations

import json

import pytest

from .conftest import Endpoints

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def test_raw_prompt_gives_the_text_of_a_completion(model: Endpoints) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    completion, chat = model.complete(**body), model.answer(CHAT, **body)

    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == completion["usage"]["prompt_tokens"]


def test_raw_prompt_streams_with_n_stop_and_logprobs(fake: Endpoints) -> None:
    body = {"prompt": "Once", "n": 2, "seed": 5, "max_tokens": 12, "stop": [" the"], "logprobs": True}
    whole = fake.answer(CHAT, **body)["choices"]
    chunks = [json.loads(event) for event in fake.stream(CHAT, **body)[:-1]]

    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert " the" not in choice["message"]["content"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]


@pytest.mark.llguidance
def test_raw_prompt_can_be_constrained(fake: Endpoints) -> None:
    choice = fake.answer(CHAT, prompt="Yes or no?", structured_outputs={"choice": ["yes", "no"]})["choices"][0]

    assert choice["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{}, {"messages": MESSAGES, "prompt": "Hi"}, {"messages": None, "prompt": None}])
def test_exactly_one_of_messages_and_prompt(fake: Endpoints, body: dict, stream: bool) -> None:
    message = fake.refusal(CHAT, **body, stream=stream)["message"]

    assert "messages" in message and "prompt" in message


@pytest.mark.parametrize("prompt", ["", 5, ["a"], [1, 2], {"a": 1}])
def test_wrong_raw_prompts_are_refused(fake: Endpoints, prompt: object) -> None:
    assert fake.refusal(CHAT, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]),
        ("enable_thinking", True),
        ("reasoning_effort", "low"),
        ("thinking_budget", 5),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
def test_fields_of_templates_are_refused_with_a_raw_prompt(fake: Endpoints, name: str, value: object) -> None:
    assert fake.refusal(CHAT, prompt="Hi", **{name: value})["param"] == name
