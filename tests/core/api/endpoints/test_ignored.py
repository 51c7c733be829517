"""What has no effect inside messages and calls is listed in the header, like unknown fields elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Endpoints

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def ignored(fake: Endpoints, *messages: dict[str, Any], **fields: Any) -> str | None:
    response = fake.post("/v1/chat/completions", messages=list(messages), max_tokens=1, **fields)
    assert response.status_code == 200, response.text
    return response.headers.get("x-enginehouse-ignored")


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}, "content[0].cache_control"),
        ({"role": "assistant", "content": "a", "annotations": [{"type": "url"}]}, "annotations"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "audio"),
        ({"role": "assistant", "content": "a", "reasoning": {"steps": 1}}, "reasoning"),
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "reasoning_content"),
        ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": [{**CALL, "signature": "x"}]}, "tool_calls[0].signature"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "strict": True}}]},
            "tool_calls[0].function.strict",
        ),
    ],
)
def test_what_means_nothing_where_it_stands_is_listed(fake: Endpoints, message: dict[str, Any], path: str) -> None:
    assert ignored(fake, message, USER) == f"messages[0].{path}"


def test_what_servers_answer_may_be_sent_back(fake: Endpoints) -> None:
    """Also with the nulls and empty lists that clients make of absent members."""
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "Hm.",
        "tool_calls": [{**CALL, "index": 0}],
    }
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "5", "compress": False}]}

    assert ignored(fake, USER, said, result, {"role": "assistant", "content": "a", "reasoning": "Hm."}, USER) is None


@pytest.mark.llguidance
def test_what_a_choice_of_tools_says_besides(fake: Endpoints) -> None:
    choice = {"type": "function", "function": {"name": "f", "strict": True}, "mode": "x"}

    assert ignored(fake, USER, tools=[TOOL], tool_choice=choice) == "tool_choice.mode, tool_choice.function.strict"
