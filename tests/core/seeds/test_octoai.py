"""Seed 002: OctoAI's chat completions. The page has no example, only parameters and a response."""

import json
from collections.abc import Callable

import httpx
import pytest

from .page import Page

PROFILE = "octoai"
Post = Callable[..., httpx.Response]


def events(body: str) -> list[dict]:
    assert body.endswith("data: [DONE]\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in body.strip().split("\n\n")[:-1] if block[0] != ":"]


def test_shape_of_a_stream(post: Post) -> None:
    chunks = events(post(stream=True).text)

    assert all(list(chunk) == ["id", "object", "created", "model", "choices"] for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("options", "n", "told"),
    [
        ({}, 1, True),
        ({"include_usage": True}, 1, True),
        ({"include_usage": True}, 3, True),
        ({"include_usage": False}, 1, False),
        (None, 1, False),
    ],
)
def test_usage_rides_on_the_last_chunk_with_content(post: Post, options, n: int, told: bool) -> None:
    chunks = events(post(stream=True, stream_options=options, n=n).text)

    assert all(chunk["choices"] for chunk in chunks)
    with_usage = [index for index, chunk in enumerate(chunks) if "usage" in chunk]
    if not told:
        assert with_usage == []
        return
    contents = [index for index, chunk in enumerate(chunks) if chunk["choices"][0]["delta"].get("content")]
    assert with_usage == [contents[-1]]
    assert chunks[contents[-1]]["usage"]["completion_tokens"] == 3 * n
    for index in range(n):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Code flows."
        assert own[-1] == {"index": index, "delta": {}, "finish_reason": "stop"}


def test_usage_without_any_content_rides_on_the_last_chunk(post: Post) -> None:
    chunks = events(post(stream=True, stream_options={}, stop="Code").text)

    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_what_was_held_back_comes_before_an_error(post: Post) -> None:
    blocks = post(model="failing", stream=True, stream_options={}).text.strip().split("\n\n")

    assert json.loads(blocks[-2].removeprefix("data: "))["choices"][0]["delta"] == {"content": "Code"}
    assert "error" in json.loads(blocks[-1].removeprefix("data: "))


def test_both_modes(post: Post) -> None:
    answer = post().json()

    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Code flows."
    assert answer["usage"]["total_tokens"] > 3


def test_default_of_max_tokens_is_512(post: Post) -> None:
    assert post(model="endless").json()["usage"]["completion_tokens"] == 512


TOOL = {"type": "function", "function": {"name": "my_function", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
PARAMETERS = [
    {"frequency_penalty": 0.5},
    {"ignore_eos": True},
    {"log_prompt": False},
    {"logit_bias": {"50": -100}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 20},
    {"max_tokens": 3},
    {"min_p": 0.05},
    {"n": 2},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"stop": "blue"},
    {"stop": ["blue", "sky"]},
    {"stream_options": {"include_usage": True}},
    {"temperature": 0.2},
    {"top_p": 0.5},
    {"user": "someone"},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"loglikelihood": False},
    pytest.param({"tools": [TOOL], "tool_choice": "required"}, marks=pytest.mark.llguidance),
    pytest.param(
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "my_function"}}},
        marks=pytest.mark.llguidance,
    ),
    pytest.param({"response_format": {"type": "json_object", "schema": SCHEMA}}, marks=pytest.mark.llguidance),
]


@pytest.mark.llamacpp
@pytest.mark.parametrize("fields", PARAMETERS, ids="-".join)
def test_parameters(page: Page, fields) -> None:
    """Every parameter of the page, streamed as the page wants it."""
    chat = {"model": "starter", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    body = {**chat, "max_tokens": 24, "stream": True, **fields}
    response = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=60)

    assert response.status_code == 200, response.text
    assert "x-enginehouse-ignored" not in response.headers
    assert "x-enginehouse-unsupported" not in response.headers
    chunks = events(response.text)
    reasons = {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]}
    assert reasons - {None} <= {"stop", "length", "tool_calls"} and len(reasons) > 1


@pytest.mark.llamacpp
def test_loglikelihood(page: Page) -> None:
    """Log-probabilities of all prompt tokens but the first."""
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1, "loglikelihood": True}
    answer = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=60).json()
    entries = answer["loglikelihood"]["content"]

    assert len(entries) == answer["usage"]["prompt_tokens"] - 1
    assert all(entry["logprob"] <= 0 for entry in entries)

    streamed = httpx.post(f"{page.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
    pieces = [chunk["loglikelihood"] for chunk in events(streamed.text) if "loglikelihood" in chunk]
    assert [entry["token"] for piece in pieces for entry in piece["content"]] == [entry["token"] for entry in entries]


def test_peft_is_refused_by_name(post: Post) -> None:
    error = post(peft="my-adapter").json()["error"]

    assert error["param"] == "peft" and "peft" in error["message"]
    assert error["code"] == "unsupported_parameter"


def test_more_than_128_tools_are_refused(post: Post) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]

    assert post(tools=tools).json()["error"]["param"] == "tools"


@pytest.mark.llamacpp
def test_token_ids_of_another_tokenizer_are_refused_by_name(page: Page) -> None:
    """The page's ``{'50256': -100}`` bans the end token of a vocabulary that the starter model does not have."""
    body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"50256": -100}, "max_tokens": 2}
    error = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=60).json()["error"]

    assert error["param"] == "logit_bias" and "50256" in error["message"]
