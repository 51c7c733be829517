"""Damaged answers of other servers, byte for byte through sockets: events or an error that is ours, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import attrs
import msgspec
import pytest
from attrs import define, field

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import Chat, EngineRequest, Event, Message, SamplingParams, Segment, StopParams

from .damage import Amount, amounts, damage_bytes, damage_json, damaged_document, run_damaged

httpx = pytest.importorskip("httpx")
from enginehouse_remote.backend import RemoteBackend  # noqa: E402
from enginehouse_remote.engine import RemoteEngine  # noqa: E402
from enginehouse_remote.options import RemoteOptions  # noqa: E402


def _chunk(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}]}


def _call(index: int, id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


_LOGPROBS = {
    "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1}]}]
}
_USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
_STREAMS: tuple[list[dict[str, Any]], ...] = (
    [
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": "Hel"}),
        _chunk({"content": "lo"}),
        _chunk({}, "stop"),
        {"choices": [], "usage": _USAGE},
    ],
    [
        _chunk({"reasoning_content": "hm"}),
        _chunk({"content": "a"}, logprobs=_LOGPROBS),
        _chunk({}, "length", stop_reason=5),
        {"choices": [], "usage": _USAGE},
    ],
    [
        _chunk({"tool_calls": [_call(0, "a", "f", "")]}),
        _chunk({"tool_calls": [_call(0, "", "", '{"x": 1}')]}),
        _chunk({"tool_calls": [_call(1, "b", "g", '{"y": 2}')]}),
        _chunk({}, "tool_calls"),
    ],
    [_chunk({"content": "x"}), {"error": {"message": "it broke", "code": 503}}],
)
_ERRORS: tuple[Any, ...] = (
    {"error": {"message": "maximum context length is 512 tokens, requested 600", "code": "context_length_exceeded"}},
    {"error": {"message": "no", "type": "exceed_context_size_error", "n_prompt_tokens": 600, "n_ctx": 512}},
    {"detail": [{"loc": ["body", "x"], "msg": "wrong"}]},
    {"error": {"message": "no", "param": "top_k", "code": "unsupported_parameter"}},
)
_LIST = {
    "object": "list",
    "data": [{"id": "big", "owned_by": "enginehouse", "max_model_len": 512, "meta": {"n_ctx": 512}}],
}
_CARD = {
    "id": "big",
    "state": "ready",
    "max_context": 512,
    "capabilities": {"top_k": {"support": "native", "reason": ""}, "min_p": {"support": "refused", "reason": "no"}},
    "parameters": {"temperature": {"value": 0.6, "origin": "model"}},
    "metadata": {"quantization": "Q4"},
    "system_fingerprint": "eh-1",
}


def _head(status: int, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode()


def _answer(random: Random, path: str) -> bytes:
    """An answer to a request for ``path``, damaged in its meaning or in its bytes."""
    status = random.choice([200, 200, 200, 400, 404, 422, 429, 500, 503, 302, 100, 204])
    if status != 200:
        wait = random.choice(["1", "9" * 400, "-1", "nan", "Wed, 21 Oct 2015 07:28:00 GMT", "0.5"])
        answer = _head(status, retry_after=wait) + damaged_document(random, random.choice(_ERRORS))
    elif path.endswith("/chat/completions"):
        chunks = random.choice(_STREAMS)
        chunks = [damage_json(random, chunk) if random.random() < 0.4 else chunk for chunk in chunks]
        end = random.choice([b"\n\n", b"\r\n\r\n"])
        body = b"".join(b"data: " + json.dumps(chunk).encode() + end for chunk in chunks) + b"data: [DONE]" + end
        answer = _head(200, content_type="text/event-stream") + body
    elif path.endswith("/tokenize"):
        answer = _head(200) + damaged_document(random, {"tokens": [1, 2, 3]})
    elif path.endswith("/detokenize"):
        answer = _head(200) + damaged_document(random, {"content": "text"})
    else:
        answer = _head(200) + damaged_document(random, _CARD if path.endswith("/big") else _LIST)
    return damage_bytes(random, answer) if random.random() < 0.5 else answer


@define(eq=False)
class _Server:
    """Answers with what ``random`` says, where there is one, else as it should."""

    random: Random | None = None
    url: str = ""
    connections: set[asyncio.Task[None]] = field(factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(task := asyncio.ensure_future(self._serve(reader, writer)))
        task.add_done_callback(self.connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            if found := re.search(rb"content-length: (\d+)", head.lower()):
                await reader.readexactly(int(found[1]))
            if self.random is not None:
                writer.write(_answer(self.random, path))
            else:
                writer.write(_head(200) + json.dumps(_CARD if path.endswith("/big") else _LIST).encode())
            await writer.drain()


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[_Server]:
    server = _Server()
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listener.close()
        while server.connections:
            await asyncio.wait(server.connections)


_OPTIONS = RemoteOptions(
    start_timeout_s=1e-6, connect_timeout_s=0.5, first_token_timeout_s=0.5, idle_timeout_s=0.5, health_interval_s=60.0
)


async def _open(url: str, start_timeout_s: float = 1e-6) -> RemoteEngine:
    options = attrs.evolve(_OPTIONS, start_timeout_s=start_timeout_s)
    return await asyncio.to_thread(RemoteBackend().open, ModelSource(url), options, lambda share, text: None)


async def _ask(engine: RemoteEngine, random: Random) -> None:
    match random.randrange(6):
        case 0:
            token_ids = await engine.tokenize([Segment("some text", True)], False)
            assert all(isinstance(token_id, int) for token_id in token_ids)
        case 1:
            assert isinstance(await engine.detokenize([1, 2]), str)
        case _:
            request = EngineRequest(
                request_id="r",
                chat=Chat(messages=(Message(role="user", content="hi"),)),
                sampling=SamplingParams(num_logprobs=random.choice([None, None, 1])),
                stopping=StopParams(max_tokens=20),
            )
            events = [event async for batch in await engine.submit(request) for event in batch]
            msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[Event])  # what they claim to be


@amounts(400)
def test_answers(amount: Amount) -> None:
    """Streams, errors and answers to questions; an engine is none the worse for them."""
    with asyncio.Runner() as runner:
        serving = _serving()
        server = runner.run(serving.__aenter__())
        engine = runner.run(_open(server.url, start_timeout_s=10.0))  # the machine may be busy

        async def case(random: Random) -> None:
            server.random = random
            async with asyncio.timeout(60):
                try:
                    await _ask(engine, random)
                except EnginehouseError as error:
                    json.dumps([error.message, error.fields], allow_nan=False)
                    assert len(error.message) < 5000
                while (await engine.stats()).num_running:  # noqa: ASYNC110 - its task ends when it is next its turn
                    await asyncio.sleep(0)

        run_damaged("answers", amount, lambda random: runner.run(case(random)))
        runner.run(engine.close())
        runner.run(serving.__aexit__(None, None, None))


@amounts(120)
def test_lists_and_cards_of_models(amount: Amount) -> None:
    """What a model is said to be is of the right types, or opening it fails with an error that is ours."""
    with asyncio.Runner() as runner:
        serving = _serving()
        server = runner.run(serving.__aenter__())

        async def case(random: Random) -> None:
            server.random = random
            async with asyncio.timeout(60):
                try:
                    engine = await _open(server.url)
                except EnginehouseError as error:
                    json.dumps(error.message)
                    return
            info = engine.info
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)) == info
            assert 1 < info.max_context < 2**31
            await engine.close()

        run_damaged("lists of models", amount, lambda random: runner.run(case(random)))
        runner.run(serving.__aexit__(None, None, None))
