"""Streams: order, numbers, ids, and that they equal the whole response."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from .harness import WEATHER, Client

OPENING = ["created", "in_progress"]
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
MESSAGE = [*TEXT, "output_item.done"]
REASONED = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def _without_repeats(types: list[str]) -> list[str]:
    """Deltas in a row as one."""
    return [kind for index, kind in enumerate(types) if not (kind.endswith(".delta") and types[index - 1] == kind)]


@pytest.mark.parametrize(
    ("model", "fields", "items"),
    [
        ("say", {}, [MESSAGE]),
        ("call", {"tools": [WEATHER]}, [CALLED]),
        ("calls", {"tools": [WEATHER]}, [MESSAGE, CALLED, CALLED]),
        ("think", {}, [REASONED, MESSAGE]),
        ("think-call", {"tools": [WEATHER]}, [REASONED, CALLED]),
        ("fast", {"tools": [WEATHER]}, [REASONED, CALLED]),
    ],
)
def test_items_open_and_close_one_after_the_other(
    client: Client, model: str, fields: dict[str, Any], items: list[list[str]]
) -> None:
    stream = client.stream(model, **fields)

    assert _without_repeats(stream.types) == [*OPENING, *(kind for item in items for kind in item), "completed"]
    assert stream.is_done


@pytest.mark.parametrize("model", ["say", "call", "calls", "think", "think-call", "fast", "patch", "namespaced"])
def test_a_stream_and_a_whole_response_have_the_same_items(client: Client, model: str) -> None:
    tools = [WEATHER, {"type": "custom", "name": "apply_patch"}]
    stream, whole = client.stream(model, tools=tools), client.create(model, tools=tools)

    def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]

    assert plain(stream.last["output"]) == plain(whole["output"])
    assert stream.last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("say", ["message"]),
        ("calls", ["message", "function_call", "function_call"]),
        ("fast", ["reasoning", "function_call"]),
        ("patch", ["custom_tool_call"]),
    ],
)
def test_openai_s_sdk_accumulates_every_stream(client: Client, model: str, kinds: list[str]) -> None:
    """Each environment has one of its two majors; newer versions raise where an event contradicts an earlier one."""
    tools: list[Any] = [WEATHER | {"strict": False}, {"type": "custom", "name": "apply_patch"}]
    with (
        OpenAI(base_url=f"{client.http.base_url}/v1", api_key="unused", max_retries=0) as sdk,
        sdk.responses.stream(model=model, input="hi", tools=tools) as stream,
    ):
        *_, last = stream
        final = stream.get_final_response()

    assert last.type == "response.completed" and [item.type for item in final.output] == kinds
    assert [item.to_dict() for item in final.output] == [item.to_dict() for item in last.response.output]
