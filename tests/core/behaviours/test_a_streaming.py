"""Group A: event framing, usage, and that streaming changes nothing."""

import json
import time

import pytest

from .client import ASK, Server, Stream, check_client_error, forced, named, pairs, streamed_calls, tool


def check_chat_framing(stream: Stream) -> None:
    headers = stream.response.headers
    assert headers["content-type"].replace(" ", "") in ("text/event-stream", "text/event-stream;charset=utf-8")
    assert headers["cache-control"] == "no-cache"
    assert "content-length" not in headers and "content-encoding" not in headers
    assert {event["object"] for event in stream.events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in stream.events}) == 1
    choices = stream.choices()
    assert all({"index", "delta", "finish_reason"} <= set(choice) for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in stream.choices(0)[1:])
    assert stream.finish_reason() in ("stop", "length")
    last = stream.choices(0)[-1]
    assert last["finish_reason"] and not last["delta"].get("content")


def test_h01_framing_role_first_finish_last(server: Server) -> None:
    check_chat_framing(server.stream_chat(max_tokens=5))


def test_h01_first_chunk_leaves_early(scripted) -> None:
    """Also to a client that would take it compressed; an answer without end would never leave as a whole."""
    headers, server = {"accept-encoding": "gzip"}, scripted("endless")
    body = server.chat_body(stream=True, max_tokens=1_000_000)
    with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert next(response.iter_raw()).startswith(b"data: {")
    check_chat_framing(
        scripted("slow").stream("/v1/chat/completions", scripted("slow").chat_body(stream=True), headers)
    )


@pytest.mark.llamacpp
def test_h01_first_text_of_a_real_model_leaves_early(starter: Server) -> None:
    body = starter.chat_body(stream=True, max_tokens=120, ignore_eos=True)
    began, times = time.perf_counter(), []
    with starter.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter() - began)

    assert len(times) > 60
    assert times[0] < times[-1] / 2


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, None, "absent"])
def test_h02_no_usage_unless_asked(server: Server, options) -> None:
    fields = {} if options == "absent" else {"stream_options": options}
    stream = server.stream_chat(max_tokens=3, **fields)

    assert stream.usage is None
    assert all(event["choices"] for event in stream.events)


def test_h02_usage_is_one_extra_chunk_at_the_end(server: Server) -> None:
    stream = server.stream_chat(max_tokens=3, stream_options={"include_usage": True})
    *earlier, last = stream.events

    assert last["choices"] == []
    assert all(event.get("usage") is None and event["choices"] for event in earlier)
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    whole = server.chat(max_tokens=3)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]


def test_h02_stream_options_without_stream_is_refused(server: Server) -> None:
    check_client_error(server.try_chat(stream_options={"include_usage": True}), "stream_options")
    check_client_error(server.try_complete(stream_options={}, stream=False), "stream_options")


BODIES = [
    {"max_tokens": 12},
    {"max_tokens": 1},
    {"max_tokens": 40, "stop": ["5"]},
    {"max_tokens": 40, "stop": [" ", "e"]},
    {"max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 30, "temperature": 1.0, "seed": 7},
    {"max_tokens": 30, "temperature": 1.0, "seed": 7, "top_p": 0.8, "top_k": 20},
    {"max_tokens": 6, "n": 2, "temperature": 1.0, "seed": 3},
    {"max_tokens": 20, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ü?"}]},
]


@pytest.mark.parametrize("fields", BODIES)
def test_h03_stream_and_whole_say_the_same(server: Server, fields) -> None:
    whole = server.chat(**fields)
    stream = server.stream_chat(stream_options={"include_usage": True}, **fields)

    for choice in whole["choices"]:
        index = choice["index"]
        assert stream.text(index) == choice["message"]["content"]
        assert stream.finish_reason(index) == choice["finish_reason"]
        if choice["logprobs"] is not None:
            streamed = [entry["token"] for entry in stream.logprobs(index)]
            assert streamed == [entry["token"] for entry in choice["logprobs"]["content"]]
    usage = stream.usage
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_h03_completions_say_the_same(server: Server) -> None:
    whole = server.complete(max_tokens=12, logprobs=2)["choices"][0]
    stream = server.stream_complete(max_tokens=12, logprobs=2)
    parts = [choice["logprobs"] for choice in stream.choices() if choice["logprobs"]]

    assert stream.text() == whole["text"]
    assert stream.finish_reason() == whole["finish_reason"]
    for name in ("tokens", "text_offset"):
        assert [item for part in parts for item in part[name]] == whole["logprobs"][name]


@pytest.mark.llguidance
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": forced("Grüße, 漢字"), "logprobs": True},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
        {"tools": [tool()], "tool_choice": "required", "parallel_tool_calls": False, "messages": ASK},
        {"tools": [tool(), tool("other")], "tool_choice": named("other"), "messages": ASK, "max_tokens": 25},
    ],
)
def test_h03_forms_and_calls_say_the_same(model_server: Server, fields) -> None:
    fields = {"max_tokens": 300, **fields}
    whole = model_server.chat(**fields)
    stream = model_server.stream_chat(stream_options={"include_usage": True}, **fields)
    choice = whole["choices"][0]

    assert stream.text() == (choice["message"]["content"] or "")
    assert stream.finish_reason() == choice["finish_reason"]
    assert pairs(streamed_calls(stream)) == pairs(choice["message"].get("tool_calls", []))
    entries = choice["logprobs"]["content"] if choice["logprobs"] else []
    assert [entry["token"] for entry in stream.logprobs()] == [entry["token"] for entry in entries]
    assert stream.usage is not None
    for name in ("prompt_tokens", "completion_tokens"):
        assert stream.usage[name] == whole["usage"][name]
