"""``token_details``: where each token of an answer came from, beside its log-probability."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Endpoints

MESSAGES = [{"role": "user", "content": "Say something."}]
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "token_details": True}
PLAIN = {"forced": False, "drafted_by": None, "exit_layer": None, "resumed": False}


def test_each_token_of_a_chat_has_its_details(fake: Endpoints) -> None:
    answer = fake.answer("/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=1, **ASKED)
    content = answer["choices"][0]["logprobs"]["content"]

    assert len(content) == answer["usage"]["completion_tokens"]
    assert [{name: entry[name] for name in PLAIN} for entry in content] == [PLAIN] * len(content)
    assert not set(PLAIN) & set(content[0]["top_logprobs"][0])


@pytest.mark.llguidance
def test_tokens_that_a_grammar_left_no_choice_are_forced(fake: Endpoints) -> None:
    fields = {**ASKED, "max_tokens": 30, "structured_outputs": {"choice": ["one and", "one or"]}}
    answer = fake.answer("/v1/chat/completions", messages=MESSAGES, logprobs=True, **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    forced = {entry["token"]: entry["forced"] for entry in content}

    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert forced["e"] and not any(forced.get(letter) for letter in ("a", "an", "and", "or"))


@pytest.mark.parametrize("stream", [False, True])
def test_completions_list_the_details(fake: Endpoints, stream: bool) -> None:
    fields = {"prompt": "Once", "logprobs": 1, **ASKED}
    if stream:
        chunks = [json.loads(line) for line in fake.stream("/v1/completions", **fields)[:-1]]
        listed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        details = [one for logprobs in listed if logprobs for one in logprobs["token_details"]]
    else:
        details = fake.complete(**fields)["choices"][0]["logprobs"]["token_details"]

    assert details == [PLAIN] * 8


def test_tokens_of_an_echoed_prompt_have_none(fake: Endpoints) -> None:
    logprobs = fake.complete(prompt="Once", logprobs=0, echo=True, **ASKED)["choices"][0]["logprobs"]
    num_prompt = len(logprobs["tokens"]) - 8

    assert num_prompt > 0
    assert logprobs["token_details"] == [None] * num_prompt + [PLAIN] * 8


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "Once"})]
)
def test_details_need_log_probabilities(fake: Endpoints, path: str, body: dict[str, Any]) -> None:
    refused = fake.refusal(path, **body, **ASKED)

    assert refused["param"] == "token_details" and "logprobs" in refused["message"]


def test_without_the_field_nothing_is_added(fake: Endpoints) -> None:
    chat = fake.answer("/v1/chat/completions", messages=MESSAGES, logprobs=True, max_tokens=2)
    text = fake.complete(prompt="Once", logprobs=1, max_tokens=2)

    assert set(chat["choices"][0]["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert "token_details" not in text["choices"][0]["logprobs"]
