"""Requests over HTTP: what is repeated, left out and refused, and what clients reported of other servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .harness import PATCH, WEATHER, Client

FORMAT = {
    "type": "json_schema",
    "name": "point",
    "schema": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}},
}


def test_a_response_repeats_its_request(client: Client) -> None:
    fields = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "presence_penalty": 0.5,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [WEATHER],
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
    }
    response = client.create("say", **fields)

    assert {name: response[name] for name in fields} == {**fields, "tools": [{**WEATHER, "strict": None}]}
    assert response["id"].startswith("resp_") and response["completed_at"] >= response["created_at"]
    assert response["output"][0]["id"].startswith("msg_")


def test_a_response_says_what_was_used_where_the_request_says_nothing(client: Client) -> None:
    response = client.create("warm")

    assert (response["temperature"], response["top_p"], response["presence_penalty"]) == (0.7, 1, 0)


def test_the_opening_events_have_the_whole_response(client: Client) -> None:
    """llama.cpp PR 21174: no created_at and model there."""
    created = client.stream("say").events[0]["response"]

    assert created["model"] == "say" and created["created_at"] > 0 and created["usage"] is None


def test_members_that_nothing_reads_are_listed(client: Client) -> None:
    """Also those of nested objects; what a response itself has may be sent back without."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}], "x": 1},
        *client.create("say")["output"],
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "fc", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a", "y": 1}]},
    ]
    body = {
        "model": "say",
        "input": items,
        "tools": [{**WEATHER, "x": 1}, {"type": "custom", "name": "c", "format": {"type": "text", "x": 1}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [], "x": 1},
        "text": {"x": 1, "format": {"type": "text", "x": 1}},
        "reasoning": {"effort": None, "x": 1},
    }
    whole = {**body, "stream_options": {"x": 1}, "include": ["reasoning.encrypted_content", "x"]}
    expected = [
        *("input[0].x", "input[0].content[0].x", f"input[{len(items) - 1}].output[0].y", "tools[0].x"),
        *("tools[1].format.x", "tool_choice.x", "text.x", "text.format.x", "reasoning.x"),
    ]
    answer = client.http.post("/v1/responses", json=whole)
    counted = client.http.post("/v1/responses/input_tokens", json=body)

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-enginehouse-ignored"].split(", ") == [*expected, "stream_options.x", "include[1]"]
    assert counted.headers["x-enginehouse-ignored"].split(", ") == expected


def test_tools_of_other_types_are_left_out_and_listed(client: Client) -> None:
    """llama.cpp #20156, LM Studio #1810: Codex sends these with every request."""
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}, {"type": "mcp"}]
    namespace = {"type": "namespace", "name": "mcp__files", "description": "", "tools": [{**WEATHER, "name": "read"}]}
    stream = client.stream("namespaced", tools=[WEATHER, *hosted, namespace], tool_choice="auto")

    assert stream.headers["x-enginehouse-ignored"] == "tools[1], tools[2], tools[3]"
    (call,) = stream.last["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == ("read", "mcp__files", {"path": "a"})
    assert [tool["type"] for tool in stream.last["tools"]] == ["function", "namespace"]


def test_calls_in_a_row_are_each_added_and_done(client: Client) -> None:
    """llama.cpp PR 18486, vLLM PR 52418: missing or interleaved events."""
    stream = client.stream("calls", tools=[WEATHER])
    calls = stream.last["output"][1:]

    assert [json.loads(call["arguments"]) for call in calls] == [{"place": "Rome"}] * 2
    assert len({call["call_id"] for call in calls}) == len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("model", ["think-call", "fast"])
def test_markup_of_reasoning_and_calls_is_never_text(client: Client, model: str) -> None:
    """vLLM #36435, PR 37071: markup as text, and lost ends when a step has several tokens."""
    stream = client.stream(model, tools=[WEATHER], include=["reasoning.encrypted_content"])
    reasoning, call = stream.last["output"]

    assert reasoning["content"] == [{"type": "reasoning_text", "text": "plan"}] and reasoning["encrypted_content"]
    assert call["type"] == "function_call" and "output_text.delta" not in stream.types


def test_sealed_reasoning_comes_back_to_the_model(client: Client) -> None:
    first = client.create("think", include=["reasoning.encrypted_content"])
    (reasoning, message), user = first["output"], {"role": "user", "content": "hi"}
    sealed = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    lengths = [
        client.create("think", [user, item, message, user])["usage"]["input_tokens"]
        for item in (sealed, {**sealed, "encrypted_content": "foreign"})
    ]

    assert lengths[0] - lengths[1] == len("plan A")


@pytest.mark.parametrize(("limit", "status"), [(2, "incomplete"), (100, "completed")])
def test_a_limit_makes_a_response_incomplete(client: Client, limit: int, status: str) -> None:
    response = client.stream("say", max_output_tokens=limit).last

    assert response["status"] == response["output"][0]["status"] == status
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert client.create("say", max_output_tokens=limit)["status"] == status


def test_a_failure_ends_the_stream_with_the_failed_response(client: Client) -> None:
    """SGLang #9963, vLLM PR 25719: no proper end."""
    stream = client.stream("breaks")

    assert stream.last["error"]["code"] == "server_error" and stream.last["error"]["message"]
    assert stream.last["output"][0]["content"][0]["text"] == "Hello" and stream.is_done
    assert client.refused("breaks", status=500)["message"]


def test_log_probabilities_belong_to_their_text(client: Client) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = client.stream("say", **fields).last["output"][0]["content"][0]

    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert client.create("say")["output"][0]["content"][0]["logprobs"] == []


def test_an_answer_of_nothing_is_an_empty_message(client: Client) -> None:
    assert client.stream("nothing").last["output"][0]["content"][0]["text"] == ""


def test_a_custom_tool_gets_plain_text(client: Client) -> None:
    stream = client.stream("patch", tools=[{"type": "custom", "name": "apply_patch"}])
    (call,) = stream.last["output"]

    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert stream.types.count("custom_tool_call_input.delta") > 5


def test_input_tokens_are_those_of_the_response(client: Client) -> None:
    body = {"model": "say", "input": "hi", "tools": [WEATHER], "instructions": "Be brief."}
    counted = client.http.post("/v1/responses/input_tokens", json=body).json()

    usage = client.create(**body)["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_truncation_drops_the_oldest_turns(client: Client) -> None:
    """The model's context has 400 tokens, of one byte each."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x" * 300}
    items: list[dict[str, Any]] = [{"role": "user", "content": "a"}, call, output, {"role": "user", "content": "b"}]

    refused = client.refused("small", items)
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    assert client.refused("small", items, truncation="disabled")["code"] == "context_length_exceeded"
    short = client.create("small", items, truncation="auto")
    assert short["usage"]["input_tokens"] == client.create("small", items[3:])["usage"]["input_tokens"]
    alone = [{"role": "user", "content": "x" * 500}]
    assert client.refused("small", alone, truncation="auto")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "telepathy"}]}, "input[0].type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"text": "short"}, "text"),
        ({"text": {"verbosity": "chatty"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {**FORMAT, "schema": 7}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": FORMAT}}, "text.format.schema"),  # a script follows no constraint
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "none"}, "enable_thinking": True}, "reasoning.effort"),
        ({"truncation": "maybe"}, "truncation"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "missing"}, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: Client, fields: dict[str, Any], param: str) -> None:
    status = 404 if param == "model" else 400
    body = {"model": "say", "input": "hi", **fields}
    errors = [
        client.http.post(path, json={**body, "stream": stream})
        for path in ("/v1/responses", "/responses")
        for stream in (False, True)
    ]

    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in errors] == [(status, param)] * 4


def test_nulls_and_unknown_fields_are_no_reason_to_refuse(client: Client) -> None:
    fields = dict.fromkeys(
        ("stream", "instructions", "tools", "text", "reasoning", "temperature", "metadata", "include")
    )
    answer = client.http.post("/v1/responses", json={"model": "say", "input": "hi", **fields, "client_metadata": {}})

    assert answer.status_code == 200 and answer.headers["x-enginehouse-ignored"] == "client_metadata"
