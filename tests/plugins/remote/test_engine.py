"""The engine over small servers that fail, stall and vanish; every byte goes through real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    UnsupportedParameter,
)
from enginehouse.contract.types import (
    CallDelta,
    Chat,
    ChoiceFinished,
    Constraint,
    EngineRequest,
    Event,
    Message,
    ReasoningDelta,
    RequestFinished,
    SamplingParams,
    Segment,
    TextDelta,
    Thinking,
    Tool,
    ToolUse,
)
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.engine import RemoteEngine
from enginehouse_remote.options import RemoteOptions, base_url
from enginehouse_testkit.waiting import until

pytestmark = pytest.mark.remote
_ids = itertools.count()


async def open_engine(*servers: Any, **options: Any) -> RemoteEngine:
    options = {"health_interval_s": 0.05, "start_timeout_s": 0.2, **options}
    urls = tuple(server.url for server in servers[1:])
    source = ModelSource(servers[0].url)
    return await asyncio.to_thread(
        RemoteBackend().open, source, RemoteOptions(urls=urls, **options), lambda share, text: None
    )


def chat(text: str = "hi", **fields: Any) -> EngineRequest:
    members = {name: fields.pop(name) for name in ("tool_use", "thinking", "template_variables") if name in fields}
    messages = (Message(role="user", content=text),)
    return EngineRequest(request_id=f"r{next(_ids)}", chat=Chat(messages=messages, **members), **fields)


async def read(engine: RemoteEngine, request: EngineRequest) -> list[Event]:
    generation = await engine.submit(request)
    return [event async for batch in generation for event in batch]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def fails(request: Any, wire: Any) -> None:
    wire.body({"error": {"message": "out of memory", "type": "server_error"}}, 500)


async def breaks_before_text(request: Any, wire: Any) -> None:
    wire.head(content_type="text/event-stream")
    await wire.chunk({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
    wire.writer.transport.abort()


async def breaks_after_text(request: Any, wire: Any) -> None:
    wire.head(content_type="text/event-stream")
    await wire.text("Hel")
    await asyncio.sleep(0.05)
    wire.writer.transport.abort()


async def never_ends(request: Any, wire: Any) -> None:
    wire.head(content_type="text/event-stream")
    while True:
        await wire.text("tick ")
        await asyncio.sleep(0.01)


async def says_nothing(request: Any, wire: Any) -> None:
    wire.head(content_type="text/event-stream")
    wire.writer.write(b": waiting\n\n")
    await asyncio.sleep(60)


def refuses(status: int, **error: Any) -> Any:
    async def answer(request: Any, wire: Any) -> None:
        wire.body({"error": {"message": "no", "type": "x", "param": None, "code": None, **error}}, status)

    return answer


async def test_answer_comes_with_its_usage_and_its_end(small_server: Any) -> None:
    engine = await open_engine(await small_server())
    events = await read(engine, chat())
    await engine.close()

    assert text_of(events) == "Hello there"
    finished, summary = events[-2:]
    assert isinstance(finished, ChoiceFinished)
    assert isinstance(summary, RequestFinished)
    assert (finished.finish_reason, finished.usage.completion_tokens) == ("stop", 2)
    assert (summary.usage.prompt_tokens, summary.usage.completion_tokens) == (7, 2)


async def test_request_is_written_out_with_the_key(small_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "secret")
    server = await small_server()
    engine = await open_engine(server, api_key_env="UPSTREAM_KEY")
    await read(engine, chat("question", sampling=SamplingParams(temperature=0.5, seed=3, logit_bias={5: -100})))
    await engine.close()

    request = server.requests[0]
    assert request["model"] == "big"
    assert request["messages"] == [{"role": "user", "content": "question"}]
    assert (request["temperature"], request["seed"], request["top_p"]) == (0.5, 3, 1.0)
    assert request["logit_bias"] == {"5": -100}
    assert request["stream_options"] == {"include_usage": True}
    assert "top_k" not in request  # not OpenAI's
    assert server.headers[0]["authorization"] == "bearer secret"


async def test_top_p_of_0_is_sent_as_a_share_that_every_server_takes(small_server: Any) -> None:
    server = await small_server()
    engine = await open_engine(server)
    await read(engine, chat("question", sampling=SamplingParams(top_p=0.0)))
    await engine.close()

    assert 0 < server.requests[0]["top_p"] < 1e-6  # vLLM and TGI refuse 0


async def test_kind_decides_what_is_written_and_how(small_server: Any) -> None:
    server = await small_server(owned_by="llamacpp")
    engine = await open_engine(server)
    grammar = Constraint(kind="gbnf", text='root ::= "a"', param="grammar")
    sampling = SamplingParams(repetition_penalty=1.25, min_p=0.1)
    await read(engine, chat(sampling=sampling, constraint=grammar, thinking=Thinking(enabled=False)))
    with pytest.raises(UnsupportedParameter) as refused:
        await engine.submit(chat(constraint=Constraint(kind="regex", text="a+", param="guided_regex")))
    await engine.close()

    request = server.requests[0]
    assert (request["repeat_penalty"], request["min_p"], request["top_k"]) == (1.25, 0.1, 0)
    assert request["grammar"] == 'root ::= "a"'
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert refused.value.param == "guided_regex"
    assert "guided_regex" in engine.info.engine.refused


async def test_requests_go_where_the_least_runs(small_server: Any) -> None:
    servers = [await small_server(never_ends), await small_server(never_ends)]
    engine = await open_engine(*servers)
    running = [await engine.submit(chat()) for _ in range(6)]
    counts = [len(server.requests) for server in servers]
    for generation in running:
        generation.cancel()
    await until(lambda: [server.num_left for server in servers] == [3, 3])
    stats = await engine.stats()
    await engine.close()

    assert counts == [3, 3]
    assert stats.num_running == 0


@pytest.mark.parametrize("failure", [fails, breaks_before_text, refuses(429), refuses(401), refuses(404), refuses(503)])
async def test_another_server_takes_over_before_the_first_token(small_server: Any, failure: Any) -> None:
    bad, good = await small_server(failure), await small_server()
    engine = await open_engine(bad, good)
    events = await read(engine, chat())
    await engine.close()

    assert text_of(events) == "Hello there"
    assert (len(bad.requests), len(good.requests)) == (1, 1)


async def test_server_that_is_gone_is_left_alone_until_it_is_back(small_server: Any) -> None:
    gone, good = await small_server(), await small_server()
    engine = await open_engine(gone, good)
    gone.stop()
    texts = [text_of(await read(engine, chat())) for _ in range(4)]
    states = [server.is_up for server in engine.servers.all]
    await gone.start()
    await until(lambda: engine.servers.all[0].is_up)
    num_before = len(gone.requests)
    await read(engine, chat())
    await read(engine, chat())
    await engine.close()

    assert texts == ["Hello there"] * 4
    assert states == [False, True]
    assert (num_before, len(gone.requests) > 0) == (0, True)


async def test_broken_answer_ends_with_a_retryable_error_and_not_with_a_second_answer(small_server: Any) -> None:
    bad, good = await small_server(breaks_after_text), await small_server()
    engine = await open_engine(bad, good)
    generation = await engine.submit(chat())
    seen: list[Event] = []
    with pytest.raises(EngineDead, match="before it was complete"):
        async for batch in generation:
            seen += batch
    await engine.close()

    assert text_of(seen) == "Hel"
    assert good.requests == []


async def test_no_server_left_is_retryable_and_names_how_many_were_asked(small_server: Any) -> None:
    engine = await open_engine(await small_server(fails), await small_server(fails))
    with pytest.raises(EngineDead, match=r"none of the 2 servers .* out of memory"):
        await engine.submit(chat())
    await engine.close()


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"message": "bad seed", "param": "seed"}, InvalidRequest),
        (422, {"message": "bad seed", "param": "seed"}, InvalidRequest),
        (400, {"message": "seed: no", "param": "seed", "code": "unsupported_parameter"}, UnsupportedParameter),
        (429, {"message": "busy"}, Overloaded),
        (401, {"message": "who are you"}, GenerationFailed),
        (503, {"message": "starting"}, EngineDead),
    ],
)
async def test_refusals_keep_their_meaning_and_their_field(
    small_server: Any, status: int, error: dict[str, Any], expected: type[Exception]
) -> None:
    server = await small_server(refuses(status, **error))
    engine = await open_engine(server)
    with pytest.raises(expected) as raised:
        await engine.submit(chat())
    await engine.close()

    assert error["message"] in str(raised.value)
    assert getattr(raised.value, "param", error.get("param")) == error.get("param")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "error",
    [
        {
            "message": "The prompt has 300 tokens, but this model's context holds 200 tokens",
            "code": "context_length_exceeded",
        },
        {"message": "too long", "type": "exceed_context_size_error", "n_prompt_tokens": 300, "n_ctx": 200},
        {
            "message": "This model's maximum context length is 200 tokens. However, you requested 310 tokens "
            "(300 in the messages, 10 in the completion)."
        },
    ],
)
async def test_prompt_that_is_too_long_there_is_too_long_here(small_server: Any, error: dict[str, Any]) -> None:
    engine = await open_engine(await small_server(refuses(400, **error)))
    with pytest.raises(ContextLengthExceeded) as raised:
        await engine.submit(chat())
    await engine.close()

    assert (raised.value.num_prompt_tokens, raised.value.max_context) == (300, 200)


async def test_silence_and_floods_are_limited(small_server: Any) -> None:
    engine = await open_engine(await small_server(says_nothing), first_token_timeout_s=0.2, max_requests=1)
    generation = await engine.submit(chat())
    with pytest.raises(Overloaded):
        await engine.submit(chat())
    with pytest.raises(EngineDead, match=r"sent nothing for 0.2 s"):
        async for _ in generation:
            pass
    await engine.close()


async def test_closing_ends_what_runs(small_server: Any) -> None:
    server = await small_server(never_ends)
    engine = await open_engine(server)
    generation = await engine.submit(chat())
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        async for _ in generation:
            pass
    await until(lambda: server.num_left == 1)


async def test_calls_reasoning_and_logprobs_are_read(small_server: Any) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        entry = {"token": "ü", "logprob": -0.5, "bytes": [195, 188], "top_logprobs": [{"token": "ü", "logprob": -0.5}]}
        deltas: list[dict[str, Any]] = [
            {"reasoning_content": "think"},
            {"content": "ü"},
            {"tool_calls": [{"index": 3, "id": "a", "function": {"name": "lamp", "arguments": ""}}]},
            {"tool_calls": [{"index": 3, "function": {"arguments": '{"on": true}'}}]},
            {"tool_calls": [{"index": 4, "id": "b", "function": {"name": "door", "arguments": "{}"}}]},
        ]
        for delta in deltas:
            logprobs = {"content": [entry]} if "content" in delta else None
            await wire.chunk({"choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]})
        await wire.end("tool_calls", prompt_tokens=1, completion_tokens=9)

    server = await small_server(answer)
    engine = await open_engine(server)
    tool = Tool(name="lamp", parameters={}, definition={"type": "function", "function": {"name": "lamp"}})
    use = ToolUse(tools=(tool,), choice="required", only="lamp", parallel=False)
    events = await read(engine, chat(tool_use=use, sampling=SamplingParams(num_logprobs=1)))
    await engine.close()

    assert [event.text for event in events if isinstance(event, ReasoningDelta)] == ["think"]
    calls = [event for event in events if isinstance(event, CallDelta)]
    assert [(call.call, call.name, call.arguments) for call in calls] == [
        (0, "lamp", ""),
        (0, None, '{"on": true}'),
        (1, "door", "{}"),
    ]
    scored = next(event.logprobs for event in events if isinstance(event, TextDelta) and event.logprobs)
    assert (scored[0].token, scored[0].logprob, len(scored[0].top)) == ("ü".encode(), -0.5, 1)
    request = server.requests[0]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "lamp"}}
    assert request["parallel_tool_calls"] is False
    assert (request["logprobs"], request["top_logprobs"]) == (True, 1)


@pytest.mark.parametrize(
    ("only", "parallel", "sent"),
    [(None, None, None), (None, True, True), (None, False, False), ("lamp", None, False)],
)
async def test_tools_are_sent_as_they_were_asked_for(
    small_server: Any, only: str | None, parallel: bool | None, sent: bool | None
) -> None:
    """Nothing is said of parallel calls where the client said nothing, and `strict` reaches who could follow it."""

    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        call = {"index": 0, "id": "a", "function": {"name": "lamp", "arguments": "{}"}}
        await wire.chunk({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
        await wire.end("tool_calls", prompt_tokens=1, completion_tokens=1)

    server = await small_server(answer)
    engine = await open_engine(server)
    tools = tuple(
        Tool(name=name, parameters={}, definition={"type": "function", "function": {"name": name}}, strict=strict)
        for name, strict in (("lamp", True), ("door", False))
    )
    await read(engine, chat(tool_use=ToolUse(tools=tools, choice="required", only=only, parallel=parallel)))
    await engine.close()

    (request,) = server.requests
    assert request.get("parallel_tool_calls") is sent
    assert [tool["function"] for tool in request["tools"]] == [{"name": "lamp", "strict": True}, {"name": "door"}]


async def test_the_last_of_several_servers_says_when_to_come_again(small_server: Any) -> None:
    async def busy(request: Any, wire: Any) -> None:
        wire.head(429, content_type="application/json", retry_after="17")
        wire.writer.write(b'{"error": {"message": "busy"}}')

    engine = await open_engine(await small_server(busy), await small_server(busy))
    with pytest.raises(Overloaded, match="none of the 2 servers") as refused:
        await engine.submit(chat())
    await engine.close()

    assert refused.value.retry_after_s == 17.0


async def test_raw_prompts_go_to_completions(small_server: Any) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        for prompt_index in range(2):
            await wire.chunk({"choices": [{"index": prompt_index, "text": "x", "finish_reason": "length"}]})
        await wire.chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})

    server = await small_server(answer)
    engine = await open_engine(server)
    request = EngineRequest(request_id="a", segments=(Segment("Once", True),), add_special=True, num_choices=2)
    events = await read(engine, request)
    await read(engine, EngineRequest(request_id="b", token_ids=(1, 2), num_choices=2))
    await engine.close()

    assert [event.finish_reason for event in events if isinstance(event, ChoiceFinished)] == ["length", "length"]
    assert [request["prompt"] for request in server.requests] == ["Once", [1, 2]]
    assert server.requests[0]["n"] == 2


@pytest.mark.parametrize("chunk", [b"{", b"[1]", b'{"choices": [{"index": 7}]}', b'{"choices": [{"delta": 5}]}'])
async def test_nonsense_is_an_error_and_no_answer(small_server: Any, chunk: bytes) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        await wire.chunk(chunk)

    engine = await open_engine(await small_server(answer))
    generation = await engine.submit(chat())
    with pytest.raises(GenerationFailed, match="remote server"):
        async for _ in generation:
            pass
    await engine.close()


async def test_cut_answer_is_an_error_and_no_short_answer(small_server: Any) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        await wire.text("Hel")

    engine = await open_engine(await small_server(answer))
    generation = await engine.submit(chat())
    with pytest.raises(EngineDead, match="before it was complete"):
        async for _ in generation:
            pass
    await engine.close()


async def test_opening_needs_a_server_that_answers_and_has_the_model(small_server: Any) -> None:
    server = await small_server()
    with pytest.raises(ModelLoadError, match="serves no model 'huge'; it serves: 'big'"):
        await open_engine(server, model="huge")
    server.stop()
    with pytest.raises(EngineDead, match="no server of this model answers"):
        await open_engine(server)
    with pytest.raises(ModelLoadError, match="the environment variable 'NOWHERE' is not set"):
        await open_engine(server, api_key_env="NOWHERE")


def test_addresses_match_and_nothing_else() -> None:
    backend = RemoteBackend()

    assert backend.match(ModelSource("http://localhost:8000/v1")).score == 1
    assert backend.match(ModelSource("model.gguf")).score == 0
    assert base_url("http://a:1") == "http://a:1/v1"
    assert base_url("https://a/api/v1/") == "https://a/api/v1"
    with pytest.raises(ValueError, match="not an address"):
        RemoteOptions(urls=("localhost:8000",))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(top_k=5), "top_k"),
        (SamplingParams(extensions={"xtc": {"xtc_probability": 0.5}}), "xtc_probability"),
    ],
)
async def test_default_that_the_server_cannot_honour_is_refused_and_not_dropped(
    small_server: Any, sampling: SamplingParams, param: str
) -> None:
    """Also what no request gave: the settings of a model may hold it."""
    server = await small_server()
    engine = await open_engine(server)
    with pytest.raises(UnsupportedParameter) as refused:
        await engine.submit(chat(sampling=sampling))
    await engine.close()

    assert refused.value.param == param
    assert server.requests == []


async def test_parameters_of_the_settings_widen_and_narrow_what_is_honoured(small_server: Any) -> None:
    server = await small_server()
    engine = await open_engine(server, parameters=("min_p", "xtc_probability"), without=("seed",))
    extended = SamplingParams(min_p=0.1, seed=77, extensions={"xtc": {"xtc_probability": 0.5}})
    await read(engine, chat(sampling=extended))
    await engine.close()

    request = server.requests[0]
    assert (request["min_p"], request["xtc_probability"], "seed" in request) == (0.1, 0.5, False)
    assert "seed" in engine.info.engine.refused


@pytest.mark.parametrize(
    ("there", "here"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "content_filter"), ("tool_calls", "stop")],
)
async def test_ends_keep_their_meaning(small_server: Any, there: str, here: str) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        await wire.text("x")
        await wire.end(there)

    engine = await open_engine(await small_server(answer))
    events = await read(engine, chat())
    await engine.close()

    finished = next(event for event in events if isinstance(event, ChoiceFinished))
    summary = events[-1]
    assert isinstance(summary, RequestFinished)
    assert finished.finish_reason == here
    assert summary.usage.completion_tokens == 1  # a server that counts nothing gets its pieces counted


async def test_client_that_leaves_before_the_answer_begins_is_gone_there_too(small_server: Any) -> None:
    async def waits(request: Any, wire: Any) -> None:
        await asyncio.sleep(60)

    server = await small_server(waits)
    engine = await open_engine(server)
    submitting = asyncio.ensure_future(engine.submit(chat()))
    await until(lambda: server.requests)
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    await until(lambda: server.num_left == 1)
    stats = await engine.stats()
    await engine.close()

    assert stats.num_running == 0


async def test_logprobs_that_do_not_come_are_an_error(small_server: Any) -> None:
    engine = await open_engine(await small_server())
    generation = await engine.submit(chat(sampling=SamplingParams(num_logprobs=0)))
    with pytest.raises(GenerationFailed, match="reported no log-probabilities"):
        async for _ in generation:
            pass
    await engine.close()


async def test_llama_server_is_asked_for_one_alternative_where_none_is_wanted(small_server: Any) -> None:
    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        top = [{"token": "x", "logprob": -0.1}, {"token": "y", "logprob": -3.0}]
        entry = {"token": "x", "logprob": -0.1, "bytes": [120], "top_logprobs": top}
        choice = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
        await wire.chunk({"choices": [choice]})
        await wire.chunk(b"[DONE]")

    server = await small_server(answer, owned_by="llamacpp")
    engine = await open_engine(server)
    tops = []
    for wanted in (0, 1):
        events = await read(engine, chat(sampling=SamplingParams(num_logprobs=wanted)))
        tops.append(
            [len(entry.top) for event in events if isinstance(event, TextDelta) for entry in event.logprobs or ()]
        )
    await engine.close()

    assert [request["top_logprobs"] for request in server.requests] == [1, 1]
    assert tops == [[0], [1]]


async def test_required_call_that_does_not_come_is_an_error(small_server: Any) -> None:
    engine = await open_engine(await small_server())
    tool = Tool(name="lamp", parameters={}, definition={"type": "function", "function": {"name": "lamp"}})
    generation = await engine.submit(chat(tool_use=ToolUse(tools=(tool,), choice="required")))
    with pytest.raises(GenerationFailed, match="made no call"):
        async for _ in generation:
            pass
    await engine.close()


async def test_lines_end_with_line_feeds_only_wherever_the_bytes_are_cut(small_server: Any) -> None:
    text = "a\u2028b\x85c\u2029d🧑🏽‍🚀"

    async def answer(request: Any, wire: Any) -> None:
        wire.head(content_type="text/event-stream")
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        body = f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\r\n\r\ndata: [DONE]\r\n\r\n"
        for byte in body.encode():
            wire.writer.write(bytes([byte]))
            await wire.writer.drain()

    engine = await open_engine(await small_server(answer))
    events = await read(engine, chat())
    await engine.close()

    assert text_of(events) == text
