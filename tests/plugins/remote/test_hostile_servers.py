"""Servers that answer to do harm: every answer is read within bounds of bytes and time, and ends as an error."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from attrs import define, field

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EngineDead, EnginehouseError, Overloaded
from enginehouse.contract.types import Chat, EngineRequest, Message, Segment, StopParams
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.engine import RemoteEngine
from enginehouse_remote.options import RemoteOptions
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import until

pytestmark = [pytest.mark.remote, pytest.mark.timeout(60)]

MODELS = json.dumps({"data": [{"id": "big", "owned_by": "enginehouse"}]}).encode()
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
TEXT = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": null}]}\n\n'
MAX_BYTES = 16 * 1024 * 1024
"""What the sockets between two ends may hold besides what is read."""


@define
class Attacker:
    """Answers each address with what ``answers`` has for it; counts what it could send."""

    answers: dict[str, Callable[[asyncio.StreamWriter], Awaitable[None]]]
    num_bytes: int = 0
    url: str = ""
    connections: set[asyncio.Task[None]] = field(factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.ensure_future(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        answer = self.answers.get(head.split()[1].removeprefix("/v1"), models)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            await answer(writer)

    def sends(self, begin: bytes, again: bytes = b"", pause_s: float = 0.0) -> Any:
        """An answer that begins so and then goes on and on."""

        async def answer(writer: asyncio.StreamWriter) -> None:
            writer.write(begin)
            await writer.drain()
            while again:
                writer.write(again)
                await writer.drain()
                self.num_bytes += len(again)
                await asyncio.sleep(pause_s)

        return answer


async def models(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + MODELS)
    await writer.drain()


@pytest.fixture
async def attacker() -> AsyncIterator[Attacker]:
    attacker = Attacker({})
    server = await asyncio.start_server(attacker.accept, "127.0.0.1", 0)
    attacker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield attacker
    server.close()
    for connection in attacker.connections:
        connection.cancel()
    await asyncio.gather(*attacker.connections, return_exceptions=True)
    await asyncio.sleep(0)  # what they closed is closed now


async def open_engine(url: str, **options: Any) -> RemoteEngine:
    chosen = RemoteOptions(**{"start_timeout_s": 0.2, "idle_timeout_s": 1.0, "first_token_timeout_s": 2.0, **options})
    return await asyncio.to_thread(RemoteBackend().open, ModelSource(url), chosen, lambda share, text: None)


async def error_of(url: str, max_tokens: int = 20, **options: Any) -> EnginehouseError:
    """How a request ends; checks that it does soon."""
    engine = await open_engine(url, **options)
    request = EngineRequest(
        request_id="r",
        chat=Chat(messages=(Message(role="user", content="hi"),)),
        stopping=StopParams(max_tokens=max_tokens),
    )
    began = time.monotonic()
    with pytest.raises(EnginehouseError) as caught:
        async for _ in await engine.submit(request):
            pass
    assert time.monotonic() - began < 60
    await engine.close()
    return caught.value


BIG = b"x" * 65536
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "error": (b"HTTP/1.1 400 Bad\r\n\r\n", BIG),
    "error_that_fails": (b"HTTP/1.1 500 Bad\r\n\r\n", BIG),
    "error_in_json": (b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "', BIG),
    "line": (OK + b"\r\n", BIG),
    "comments": (OK + b"\r\n", b": ping\n\n" * 8192),
    "empty_lines": (OK + b"\r\n", b"\n" * 65536),
    "empty_events": (OK + b"\r\n", b"data: {}\n\n" * 6000),
    "text": (OK + b"\r\n", TEXT * 700),
    "one_long_text": (OK + b"\r\n", TEXT.replace(b"word ", BIG)),
    "text_without_its_line": (OK + b"\r\n" + TEXT + b'data: {"choices": [{"delta": {"content": "', BIG),
    "pieces_of_a_byte": (CHUNKED, b"1\r\nx\r\n" * 10000),
    "headers": (OK, b"a: b\r\n" * 10000),
    "header": (OK + b"a: ", BIG),
    "early_answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10000),
}


@pytest.mark.parametrize("data", ENDLESS.values(), ids=ENDLESS)
async def test_an_answer_without_an_end_is_read_to_a_multiple_of_what_was_asked_for(
    attacker: Attacker, data: tuple[bytes, bytes]
) -> None:
    attacker.answers["/chat/completions"] = attacker.sends(*data, pause_s=0.001)

    await error_of(attacker.url)

    await asyncio.sleep(0.1)
    assert attacker.num_bytes < MAX_BYTES


DRIPPING = {
    "head": (b"", b"H"),
    "header": (OK, b"a"),
    "error": (b"HTTP/1.1 400 Bad\r\n\r\n", b"x"),
    "comments": (OK + b"\r\n", b": ping\n\n"),
    "empty_events": (OK + b"\r\n", b'data: {"choices": []}\n\n'),
    "empty_events_behind_text": (OK + b"\r\n" + TEXT, b'data: {"choices": []}\n\n'),
    "a_line_behind_text": (OK + b"\r\n" + TEXT, b"x"),
}


@pytest.mark.parametrize("data", DRIPPING.values(), ids=DRIPPING)
async def test_drops_do_not_keep_a_request_alive(attacker: Attacker, data: tuple[bytes, bytes]) -> None:
    attacker.answers["/chat/completions"] = attacker.sends(*data, pause_s=0.2)

    assert isinstance(await error_of(attacker.url), EngineDead) or data[0].startswith(b"HTTP/1.1 400")


async def test_tokens_that_come_one_by_one_end_with_what_was_asked_for(attacker: Attacker) -> None:
    attacker.answers["/chat/completions"] = attacker.sends(OK + b"\r\n", TEXT, pause_s=0.001)

    error = await error_of(attacker.url)

    assert "has more tokens than were requested" in error.message


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
async def test_nothing_is_unpacked(attacker: Attacker, encoding: str, status: int) -> None:
    head = f"HTTP/1.1 {status} S\r\ncontent-encoding: {encoding}\r\nconnection: close\r\n\r\n"
    bomb = gzip.compress(bytes(50_000_000))
    attacker.answers["/chat/completions"] = attacker.sends(head.encode() + bomb)

    error = await error_of(attacker.url)

    assert ("compressed" in error.message) == (status == 200)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [("9" * 400, 3600.0), ("120", 120.0), ("-5", 1.0), ("nan", 1.0), ("1e9", 1.0), ("²", 1.0), ("", 1.0), ("0", 0.0)],
)
async def test_seconds_to_wait_are_bounded(attacker: Attacker, seconds: str, expected: float) -> None:
    head = f"HTTP/1.1 429 Busy\r\nretry-after: {seconds}\r\nconnection: close\r\n\r\n"
    attacker.answers["/chat/completions"] = attacker.sends(head.encode("latin-1"))

    error = await error_of(attacker.url)

    assert isinstance(error, Overloaded) and error.retry_after_s == expected


async def test_a_client_is_told_to_come_back_within_an_hour(attacker: Attacker) -> None:
    head = b"HTTP/1.1 429 Busy\r\nretry-after: " + b"9" * 400 + b"\r\nconnection: close\r\n\r\n"
    attacker.answers["/chat/completions"] = attacker.sends(head)
    model = ModelSettings(source=attacker.url, backend="remote", options={"kind": "openai"})
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=("remote",)))

    def ask() -> httpx.Response:
        with served(settings) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            return client.post("/v1/chat/completions", json=body)

    answer = await asyncio.to_thread(ask)

    assert answer.status_code == 429 and answer.headers["retry-after"] == "3600"


@pytest.mark.parametrize("path", ["/chat/completions", "/models"])
async def test_what_a_library_could_not_read_is_quoted_in_short(attacker: Attacker, path: str) -> None:
    """Found by fuzzing."""
    engine = await open_engine(attacker.url)
    await engine.close()
    attacker.answers[path] = attacker.sends(OK + b"a: " + b"x\x01" * 20_000 + b"\r\n\r\n")

    if path == "/models":
        with pytest.raises(EnginehouseError) as caught:
            await open_engine(attacker.url)
        assert len(caught.value.message) < 1000
    else:
        assert len((await error_of(attacker.url)).message) < 1000


NONSENSE = {
    "huge_counts": {"n_prompt_tokens": 10**100, "n_ctx": 10**100, "type": "exceed_context_size_error"},
    "counts_in_words": {"message": f"maximum context length is {'9' * 1500} but has {'9' * 400}"},
    "a_long_param": {"message": "no", "param": "x" * 50_000},
    "a_message_that_is_none": {"message": [[1]] * 10_000},
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
async def test_what_an_error_says_can_be_told_on(attacker: Attacker, said: dict[str, Any]) -> None:
    body = json.dumps({"error": said}).encode()
    attacker.answers["/chat/completions"] = attacker.sends(b"HTTP/1.1 400 Bad\r\nconnection: close\r\n\r\n" + body)

    error = await error_of(attacker.url)

    json.dumps(error.fields, allow_nan=False)
    assert len(error.message) <= 2000 and all(
        abs(value) < 2**53 if isinstance(value, int) else len(str(value)) < 3000 for value in error.fields.values()
    )


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(("begin", "pause_s"), [(b"HTTP/1.1 200 OK\r\n\r\n", 0.0), (b"HTTP/1.1 400 No\r\n\r\n", 0.0)])
async def test_questions_are_read_to_a_multiple_of_what_was_asked(
    attacker: Attacker, path: str, begin: bytes, pause_s: float
) -> None:
    attacker.answers[path] = attacker.sends(begin, BIG)
    engine = await open_engine(attacker.url)

    with pytest.raises(EnginehouseError):
        await (engine.tokenize([Segment("hi", True)], False) if path == "/tokenize" else engine.detokenize([1, 2]))

    assert attacker.num_bytes < MAX_BYTES
    await engine.close()


LISTS = {
    "endless": (b"HTTP/1.1 200 OK\r\n\r\n", BIG, 0.0),
    "dripping": (b"HTTP/1.1 200 OK\r\n\r\n", b" ", 0.05),
    "dripping_head": (b"", b"H", 0.05),
    "compressed": (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n" + gzip.compress(bytes(9_000_000)), b"", 0.0),
    "deep": (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"[" * 100_000, b"", 0.0),
    "no_objects": (b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [5]}', b"", 0.0),
    "a_long_name": (
        b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "' + b"n" * 100_000 + b'"}]}',
        b"",
        0.0,
    ),
}


@pytest.mark.parametrize("data", LISTS.values(), ids=LISTS)
async def test_a_list_of_models_is_read_within_bounds(attacker: Attacker, data: tuple[bytes, bytes, float]) -> None:
    attacker.answers["/models"] = attacker.sends(*data)
    began = time.monotonic()

    with pytest.raises(EnginehouseError):
        await open_engine(attacker.url, connect_timeout_s=0.5)

    assert time.monotonic() - began < 60 and attacker.num_bytes < MAX_BYTES


CARDS: dict[str, Any] = {
    "a_list": [],
    "wrong_types": {
        "capabilities": {"top_k": 5, "min_p": {"support": 7, "reason": [1]}},
        "parameters": {
            "a": 5,
            "top_p": {"origin": "model", "value": 2**64},
            "top_k": {"origin": "model", "value": 10**40},
        },
        "max_context": 10**100,
        "metadata": {"a": [[[]]]},
        "system_fingerprint": "f" * 100_000,
    },
    "many_members": {"metadata": {str(number): "x" * 100 for number in range(10_000)}},
    "aliases": {"max_context": True, "meta": 5},
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
async def test_a_card_is_believed_no_type(attacker: Attacker, card: Any) -> None:
    body = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + json.dumps(card).encode()
    attacker.answers["/models/big"] = attacker.sends(body)

    engine = await open_engine(attacker.url)

    info = engine.info
    assert 1 < info.max_context <= 2**31 and all(isinstance(reason, str) for reason in info.engine.refused.values())
    assert len(str(info.metadata)) < 600_000 and len(json.dumps(info.generation_defaults)) < 600_000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)) == info
    await engine.close()


async def test_a_name_leads_to_no_other_address(attacker: Attacker) -> None:
    attacker.answers["/models"] = attacker.sends(
        b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "a?b#c/../d e", "owned_by": "enginehouse"}]}'
    )

    engine = await open_engine(attacker.url)

    assert engine.info.metadata["remote_model"] == "a?b#c/../d e"
    await engine.close()


async def test_a_server_is_back_though_its_list_has_no_end(attacker: Attacker) -> None:
    engine = await open_engine(attacker.url, health_interval_s=0.05)
    attacker.answers["/models"] = attacker.sends(b"HTTP/1.1 200 OK\r\n\r\n", BIG)
    engine.servers.start()
    server = engine.servers.all[0]
    engine.servers.mark_down(server, "a test")

    await until(lambda: server.is_up)

    assert attacker.num_bytes < MAX_BYTES
    await engine.close()
