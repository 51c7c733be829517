"""The Messages API over HTTP: what clients send, and what they get."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.settings.config import LimitsSettings, ModelSettings, ServerSettings, Settings
from enginehouse_testkit.served import served

from .harness import LOOK, assistant, body, text, tool_result, tool_use, user

VERSION = {"anthropic-version": "2023-06-01"}


def post(client: httpx.Client, data: dict[str, Any], path: str = "/v1/messages", **options: Any) -> httpx.Response:
    return client.post(path, json=data, **options)


def whole(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return whole_of(client, body(**fields))


def whole_of(client: httpx.Client, data: dict[str, Any]) -> dict[str, Any]:
    response = post(client, data)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type."""
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    response = post(client, body(stream=True, **fields))
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return [event for event in events(response) if event["type"] != "ping"]


def blocks(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Type and content of each block."""
    return [
        (block["type"], block.get("text", block.get("thinking", block.get("input")))) for block in message["content"]
    ]


# -- answers -------------------------------------------------------------------------------------------


def test_a_message(client: httpx.Client) -> None:
    response = post(client, body(model="plain"), "/v1/messages?beta=true")
    message = response.json()

    assert message["id"].startswith("msg_")
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "model": "plain",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": len("User: Hi\nAssistant:"),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream(client: httpx.Client) -> None:
    start, *middle, delta, stop = streamed(client, model="plain")

    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == ("message_start", [], None)
    assert start["message"]["usage"]["input_tokens"] == delta["usage"]["input_tokens"] > 0
    assert [event["type"] for event in middle] == [
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
    ]
    assert [event["delta"]["text"] for event in middle[1:-1]] == ["Hel", "lo", " wor", "ld"]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}
    assert delta["usage"]["output_tokens"] == 4 and stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "plain", "max_tokens": 2}, ("max_tokens", None)),
        ({"model": "plain", "stop_sequences": ["x", "lo w"]}, ("stop_sequence", "lo w")),
        ({"model": "endless", "max_tokens": 99_999}, ("model_context_window_exceeded", None)),
        ({"model": "caller", "tools": [LOOK]}, ("tool_use", None)),
        ({"model": "plain", "max_tokens": 0}, ("max_tokens", None)),
    ],
)
def test_stop_reasons(client: httpx.Client, fields: dict[str, Any], expected: tuple[str, str | None]) -> None:
    message, (*_, delta, _) = whole(client, **fields), streamed(client, **fields)

    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == expected


def test_more_tokens_than_there_is_room_for_are_told(client: httpx.Client) -> None:
    """Clients ask for 32,000 and more, whatever the model."""
    long, short = (post(client, body(model="endless", max_tokens=most)) for most in (32_000, 3))

    assert long.headers["x-enginehouse-ignored"] == "max_tokens"
    assert "x-enginehouse-ignored" not in short.headers


def test_the_server_s_own_limit_is_kept_and_told(models: dict[str, ModelSettings]) -> None:
    settings = Settings(models={"plain": models["plain"]}, limits=LimitsSettings(max_tokens=2))
    with served(settings) as client:
        response = post(client, body(max_tokens=32_000))

    assert blocks(response.json()) == [("text", "Hello")] and response.json()["stop_reason"] == "max_tokens"
    assert response.headers["x-enginehouse-ignored"] == "max_tokens"


def test_pings_come_while_nothing_is_generated(client: httpx.Client) -> None:
    found = events(post(client, body(model="quiet", stream=True)))

    assert [event["type"] for event in found].count("ping") >= 2
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"


# -- reasoning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}])
def test_a_model_reasons_only_if_it_is_asked_to(client: httpx.Client, thinking: dict[str, Any]) -> None:
    message = whole(client, model="thinker", **thinking)

    assert "thinking" not in [kind for kind, _ in blocks(message)]
    assert all("thinking" not in str(event.get("content_block")) for event in streamed(client, model="thinker"))


def test_reasoning_comes_first_and_is_signed(client: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = whole(client, model="thinker", thinking=thinking)
    deltas = [
        event["delta"]
        for event in streamed(client, model="thinker", thinking=thinking)
        if "index" in event and "delta" in event
    ]

    assert blocks(message) == [("thinking", "plan A"), ("text", "Answer 7")]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    signature = message["content"][0]["signature"]
    assert [delta["type"] for delta in deltas] == [*["thinking_delta"] * 2, "signature_delta", *["text_delta"] * 2]
    assert deltas[2]["signature"] == signature != ""


def test_reasoning_that_is_not_shown_comes_back_in_its_signature(client: httpx.Client) -> None:
    first = whole(client, model="thinker", thinking={"type": "adaptive", "display": "omitted"})
    turns = [user("Hi"), {"role": "assistant", "content": first["content"]}, user("And?")]
    opened = post(client, {"model": "thinker", "messages": turns}, "/v1/messages/count_tokens").json()
    foreign = json.loads(json.dumps(turns).replace(first["content"][0]["signature"], "ErUB"))
    without = post(client, {"model": "thinker", "messages": foreign}, "/v1/messages/count_tokens").json()

    assert blocks(first) == [("thinking", ""), ("text", "Answer 7")]
    assert opened["input_tokens"] - without["input_tokens"] == len("plan A")


def test_signatures_of_another_server_are_those_of_a_stranger(
    client: httpx.Client, models: dict[str, ModelSettings]
) -> None:
    """As after a restart: what is shown is taken as text, and what only a signature carries is left out."""
    shown, sealed = (
        whole(client, model="thinker", thinking={"type": "adaptive", **more}) for more in ({}, {"display": "omitted"})
    )
    with served(Settings(models={"thinker": models["thinker"]})) as other:

        def count(server: httpx.Client, message: dict[str, Any]) -> int:
            turns = [user("Hi"), {"role": "assistant", "content": message["content"]}, user("And?")]
            counted = post(server, {"model": "thinker", "messages": turns}, "/v1/messages/count_tokens")
            assert counted.status_code == 200, counted.text
            return counted.json()["input_tokens"]

        assert count(other, shown) == count(client, shown) == count(client, sealed)
        assert count(client, sealed) - count(other, sealed) == len("plan A")
        assert whole(other, messages=[user("Hi"), assistant(*sealed["content"]), user("And?")], model="thinker")


def test_a_budget_ends_the_reasoning(client: httpx.Client) -> None:
    message = whole(client, model="thinker", thinking={"type": "enabled", "budget_tokens": 1})

    assert blocks(message) == [("thinking", "plan"), ("text", "Answer 7")]


# -- tools ---------------------------------------------------------------------------------------------


def test_a_call(client: httpx.Client) -> None:
    message = whole(client, model="caller", tools=[LOOK])
    found = streamed(client, model="caller", tools=[LOOK])
    partial = [event["delta"]["partial_json"] for event in found if "partial_json" in event.get("delta", {})]

    assert blocks(message) == [("text", "I look."), ("tool_use", {"at": "x y"})]
    assert message["content"][1]["id"].startswith("toolu_") and message["content"][1]["name"] == "look"
    assert json.loads("".join(partial)) == {"at": "x y"} and len(partial) > 1
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use"] and starts[1]["input"] == {}


@pytest.mark.parametrize(("parallel", "num_calls"), [({}, 2), ({"disable_parallel_tool_use": True}, 1)])
def test_parallel_calls(client: httpx.Client, parallel: dict[str, Any], num_calls: int) -> None:
    message = whole(client, model="two-calls", tools=[LOOK], tool_choice={"type": "auto", **parallel})

    assert [kind for kind, _ in blocks(message)] == ["tool_use"] * num_calls


def test_no_tools_may_be_called(client: httpx.Client) -> None:
    message = whole(client, model="caller", tools=[LOOK], tool_choice={"type": "none"})

    assert [kind for kind, _ in blocks(message)] == ["text"]


def test_results_follow_their_calls(client: httpx.Client) -> None:
    turns = (user("Hi"), assistant(tool_use(at="x")), user(tool_result([text("Seen.")]), text("Well?")))
    message = post(client, body(*turns, model="plain", tools=[LOOK])).json()

    assert blocks(message) == [("text", "Hello world")]


def test_hosted_tools_are_left_out_where_the_settings_say_so(models: dict[str, ModelSettings]) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    settings = Settings(models={"plain": models["plain"]})
    found = []
    for policy in ("reject", "report"):
        with served(evolve(settings, server=ServerSettings(unsupported_parameters=policy))) as client:
            found.append(post(client, body(tools=[LOOK, hosted])))

    refused, reported = found
    assert refused.status_code == 400 and "tools[1]" in refused.json()["error"]["message"]
    assert reported.status_code == 200 and reported.headers["x-enginehouse-unsupported"] == "tools[1]"


# -- prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"tools": [LOOK]},
        {"messages": [user("Hi"), assistant("The")]},
        {"thinking": {"type": "adaptive"}},
    ],
)
def test_counted_tokens_are_those_of_the_answer(client: httpx.Client, fields: dict[str, Any]) -> None:
    data = {**body(model="plain"), **fields}
    counted = post(
        client, {name: value for name, value in data.items() if name != "max_tokens"}, "/v1/messages/count_tokens"
    )

    assert counted.json() == {"input_tokens": post(client, data).json()["usage"]["input_tokens"]}


def test_a_last_turn_of_the_assistant_is_continued(client: httpx.Client) -> None:
    counted = post(client, {"model": "plain", "messages": [user("Hi"), assistant("The ")]}, "/v1/messages/count_tokens")

    assert counted.json()["input_tokens"] == len("User: Hi\nAssistant: The ")


@pytest.mark.parametrize("mark", [{}, {"cache_control": {"type": "ephemeral"}}])
def test_reused_and_kept_tokens_are_counted_separately(client: httpx.Client, mark: dict[str, Any]) -> None:
    """The billing block of Claude Code, different in every request, does not defeat the prefix cache."""
    turns = [user("Tell me a story about a ship. " * 20)]
    usages = []
    for nonce in ("1f3a9", "9c2d4"):
        system = [text(f"x-anthropic-billing-header: cch={nonce};"), text(f"{len(mark)} agent.", **mark)]
        response = post(client, body(*turns, model="cached", system=system, temperature=0))
        usages.append(response.json()["usage"])
        turns += [{"role": "assistant", "content": response.json()["content"]}, user("Go on.")]
        assert response.headers["x-enginehouse-ignored"] == "system[0]"
    first, second = usages
    fresh, other = ("cache_creation_input_tokens", "input_tokens")[:: 1 if mark else -1]

    assert first[other] == second[other] == len(mark) and first["cache_read_input_tokens"] < 20
    assert second["cache_read_input_tokens"] >= first[fresh] > second[fresh]


def test_what_has_no_effect_is_told(client: httpx.Client) -> None:
    data = body(user(text("Hi", tone="warm")), metadata={"user_id": "u"}, service_tier="auto", container="c", mood=1)

    assert set(post(client, data).headers["x-enginehouse-ignored"].split(", ")) == {
        "container",
        "mood",
        "messages[0].content[0].tone",
    }


def test_turns_alternate_for_templates_that_insist_on_it(client: httpx.Client) -> None:
    turns = (
        user("a"),
        {"role": "system", "content": "b"},
        user("c"),
        assistant(text("d")),
        assistant(text("e")),
        {"role": "system", "content": [text("f")]},
        user("g"),
    )

    assert whole_of(client, body(*turns, model="strict", system="s"))["content"] == [{"type": "text", "text": "Yes."}]


def test_a_request_of_claude_code(client: httpx.Client) -> None:
    """The form of its requests, version 2.1, with shorter texts."""
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    data = {
        "model": "claude-opus-5",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1.197.093; cc_entrypoint=sdk-cli;"),
            text("You are a Claude agent.", **ephemeral),
            text("You are an interactive agent.", **ephemeral),
        ],
        "messages": [
            user(text("<system-reminder>\nDate.\n</system-reminder>"), text("Change the line in hello.txt")),
            {"role": "system", "content": "Available agent types: none."},
            assistant(text("I look around."), {**tool_use("Bash", command="cat hello.txt"), "id": "toolu_5"}),
            user({**tool_result("ORIGINAL LINE", is_error=False, **ephemeral), "tool_use_id": "toolu_5"}),
        ],
        "tools": [
            {
                "name": name,
                "description": "Does something.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"command": {"type": "string"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
            }
            for name in ("Bash", "mcp__files__read_file", "Edit")
        ],
        "metadata": {"user_id": '{"device_id":"33","account_uuid":"","session_id":"b9"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    beta = {**VERSION, "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24"}
    response = post(client, data, "/v1/messages?beta=true", headers=beta)

    assert response.status_code == 200 and events(response)[-1] == {"type": "message_stop"}
    assert response.headers["x-enginehouse-ignored"] == "context_management, system[0], max_tokens"


def test_details_are_an_extension_of_the_message(client: httpx.Client) -> None:
    asked = {"x-enginehouse-details": "true"}
    message = post(client, body(model="plain"), headers=asked).json()
    *_, delta, _ = events(post(client, body(model="plain", stream=True), headers=asked))

    assert message["enginehouse"]["parameters"]["max_tokens"]["value"] == 16
    assert delta["type"] == "message_delta" and delta["enginehouse"].keys() == message["enginehouse"].keys()


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "sent"),
    [
        (400, "invalid_request_error", {"json": {"max_tokens": 5}}),
        (400, "invalid_request_error", {"json": body(max_tokens=None)}),
        (400, "invalid_request_error", {"json": body(max_tokens="5")}),
        (400, "invalid_request_error", {"json": body(stop_sequences=[""])}),
        (400, "invalid_request_error", {"json": body({"role": "user", "content": [{"type": "video"}]})}),
        (400, "invalid_request_error", {"content": b"{", "headers": {"content-type": "application/json"}}),
        (401, "authentication_error", {"json": body(), "headers": {"x-api-key": "wrong"}}),
        (403, "permission_error", {"json": body(), "headers": {"x-api-key": "watcher"}}),
        (404, "not_found_error", {"json": body(model="none")}),
        (404, "not_found_error", {"url": "/v1/messages/batches", "method": "GET"}),
        (405, "invalid_request_error", {"method": "GET"}),
        (413, "request_too_large", {"json": body(user("x" * 100_000))}),
    ],
)
def test_errors(client: httpx.Client, status: int, kind: str, sent: dict[str, Any]) -> None:
    response = client.request(**{"method": "POST", "url": "/v1/messages", **sent})
    error = response.json()

    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == response.headers["request-id"] and error["error"]["message"]


def test_a_bearer_token_is_a_key_as_well(client: httpx.Client) -> None:
    headers = {"x-api-key": "", "authorization": "Bearer alice"}

    assert post(client, body(model="plain"), headers=headers).status_code == 200


def test_a_rate_limit(client: httpx.Client) -> None:
    first, second = (post(client, body(model="plain"), headers={"x-api-key": "once"}) for _ in range(2))

    assert first.status_code == 200 and second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error" and int(second.headers["retry-after"]) > 0


def test_an_overload_is_529(models: dict[str, ModelSettings]) -> None:
    full = evolve(models["endless"], context=100_000, slots=1, options={"max_queue": 0})
    with (
        served(Settings(models={"full": full})) as client,
        client.stream("POST", "/v1/messages", json=body(max_tokens=100_000, stream=True)) as running,
    ):
        lines = running.iter_lines()
        while "text_delta" not in next(lines):
            pass
        refused = post(client, body())

    assert refused.status_code == 529 and refused.json()["error"]["type"] == "overloaded_error"
    assert int(refused.headers["retry-after"]) > 0


def test_an_error_in_a_stream_is_its_last_event(client: httpx.Client) -> None:
    *_, last = streamed(client, model="broken")

    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert last["request_id"] != "-" and last["error"]["message"].startswith("The model failed")


def test_images_need_a_model_that_takes_them(client: httpx.Client) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    response = post(client, body(user(image), model="plain"))

    assert response.status_code == 400 and "messages[0].content[0]" in response.json()["error"]["message"]


def test_a_format_needs_a_model_that_enforces_it(client: httpx.Client) -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    response = post(client, body(model="plain", output_config=config))

    assert response.status_code == 400 and "output_config.format" in response.json()["error"]["message"]


# -- other addresses -----------------------------------------------------------------------------------


def test_models_have_the_shape_of_their_client(client: httpx.Client) -> None:
    listed = client.get("/v1/models", headers=VERSION).json()
    shown = client.get("/v1/models/claude-small", headers=VERSION).json()
    of_openai = client.get("/v1/models").json()

    assert [model["id"] for model in listed["data"]] == [model["id"] for model in of_openai["data"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("plain", "cached", False)
    assert shown["type"] == "model" and shown["id"] == shown["display_name"] == "claude-small"
    assert shown["created_at"].endswith("Z") and shown["max_input_tokens"] > 0
    assert of_openai["object"] == "list" and client.get("/v1/models/plain").json()["object"] == "model"


def test_models_are_paged(client: httpx.Client) -> None:
    def page(**params: Any) -> tuple[list[str], bool]:
        found = client.get("/v1/models", params=params, headers=VERSION).json()
        return [model["id"] for model in found["data"]], found["has_more"]

    assert page(limit=2) == (["plain", "thinker"], True)
    assert page(limit=20, after_id="quiet") == (["endless", "strict", "cached"], False)
    assert page(limit=1, before_id="caller") == (["thinker"], True)
    refused = client.get("/v1/models", params={"limit": 0}, headers=VERSION)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model(client: httpx.Client) -> None:
    response = client.get("/v1/models/none", headers=VERSION)

    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


def test_claude_code_s_probe_is_answered(client: httpx.Client) -> None:
    response = client.head("/")

    assert response.status_code == 200 and response.content == b""
