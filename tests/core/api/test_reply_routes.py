"""What surfaces can do besides the example: plain routes, shared addresses, questions to core; on a real server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from attrs import evolve, frozen

from enginehouse.api.http.frames import write_chunks
from enginehouse.api.http.surfaces import Surfaces
from enginehouse.contract.calls import Call
from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.contract.surface import (
    NDJSON,
    SSE,
    Answer,
    Chunk,
    ErrorAnswer,
    Frame,
    GenerationRoute,
    Piece,
    Reply,
    ReplyRoute,
    Route,
    new_id,
)
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse.contract.usage import Usage
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.plugins.registration import Registration
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

KEYS = (
    KeySettings(name="alice", key="alice", scopes=("infer", "admin")),
    KeySettings(name="bob", key="bob", models=("hello",)),
)
ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
NAMED = Frame(media_type=SSE.media_type, before=b"data: ", after=b"\n\n", event="type", ping=b"event: ping\n\n")


@frozen(kw_only=True)
class Note:
    """A body."""

    text: str
    model: str | None = None
    color: str | None = None


async def echo(call: Call) -> Reply:
    """Return what the call holds."""
    if call.body is not None and call.body.color is not None:
        call.ignore("color")
    shown = {
        "text": None if call.body is None else call.body.text,
        "path": dict(call.path),
        "query": dict(call.query),
        "headers": {name: call.headers.get(name) for name in ("X-Note", "Authorization", "x-api-key", "Cookie")},
        "caller": [call.caller.name, call.caller.key_namespace, sorted(call.caller.scopes)],
    }
    return Reply(shown, headers=(("x-note", "kept"),))


async def ask(call: Call) -> Reply:
    """Return what core answers to the question in the path."""
    server, body, status, shown = call.server, call.body, 200, dict[str, Any]()
    match call.path["question"]:
        case "models":
            shown["data"] = [[entry.name, entry.state, bool(entry.size_bytes)] for entry in server.models()]
        case "model":
            entry = server.model(body.model)
            assert entry.info is not None and entry.fingerprint is not None
            shown |= {"name": entry.name, "task": entry.info.task, "stop": "stop" in entry.supports}
        case "defaults":
            shown |= server.defaults(body.model)
        case "count":
            messages = (Message(role="user", content=body.text),)
            chat = GenerateRequest(request_id="count", model=body.model, messages=messages)
            shown["count"] = await server.count_tokens(chat)
        case "tokens":
            token_ids = await server.tokenize(body.text, body.model)
            shown |= {"count": len(token_ids), "text": await server.detokenize(token_ids, body.model)}
        case "pin":
            shown["pinned"] = [server.pin(body.model, is_pinned).is_pinned for is_pinned in (True, False)]
        case "reload":
            shown["states"] = [(await server.unload(body.model)).state, (await server.load(body.model)).state]
        case "requests":
            shown["data"] = [one["id"] for one in await server.requests()]
        case _:
            server.cancel(body.text)
            status = 202
    return Reply(shown, status=status)


async def count(call: Call) -> Reply:
    """Stream three chunks, or fail after one."""

    async def chunks() -> AsyncIterator[Chunk]:
        yield {"type": "number", "n": 1}
        if "fail" in call.query:
            raise RuntimeError("boom")
        yield {"type": "number", "n": 2}
        yield {"n": 3}

    return Reply(stream=chunks(), frame=NAMED)


@frozen(kw_only=True)
class Tale:
    """A body of a route that generates."""

    stream: bool = False
    max_tokens: int | None = None
    stop: str | None = None


class Teller:
    """Writes how an answer has ended, and its usage."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._seen: list[Usage] = []
        self._end: list[Any] = []
        self._num_tokens = 0

    def opening(self) -> tuple[Chunk, ...]:
        return ()

    def push(self, piece: Piece) -> tuple[Chunk, ...]:
        self._seen.append(self._answer.usage())
        self._num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self._end = [piece.finish_reason, piece.stop_reason, piece.limit]
        return ()

    def close(self, usage: Usage, details: dict[str, Any] | None) -> tuple[Chunk, ...]:
        return (self.whole(usage, details),)

    def fail(self, error: ErrorAnswer) -> tuple[Chunk, ...]:
        return ({"code": error.code},)

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        first = self._seen[0]
        stages = [getattr(usage, f"{name}_s") for name in ("render", "tokenize", "queue", "prefill", "decode")]
        return {
            "id": self._answer.request_id,
            "end": self._end,
            "tokens": self._num_tokens,
            "counts": [usage.prompt_tokens, usage.completion_tokens],
            "first": [first.prompt_tokens, first.completion_tokens, first.first_token_s],
            "times": [*stages, usage.first_token_s, usage.total_s],
        }


def tell(call: Call) -> list[GenerateRequest]:
    given = {"max_tokens": call.body.max_tokens, "stop": call.body.stop and (call.body.stop,)}
    stopping = {name: value for name, value in given.items() if value is not None}
    return [GenerateRequest(request_id=new_id("tale-"), model=None, text="Tell", stopping=stopping)]


async def teller(call: Call, answer: Answer) -> Teller:
    return Teller(answer)


def route(path: str, handle: Any = echo, **more: Any) -> ReplyRoute:
    return ReplyRoute(path=path, name=path.strip("/") or "root", summary="Note", handle=handle, limits=None, **more)


class EndlessHub:
    """A hub whose downloads last until they are stopped."""

    name = "endless"
    api_version = 1

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def matches(self, text: str) -> bool:
        return text.startswith("endless/")

    def find(self, text: str) -> None:
        return None

    def is_complete(self, text: str) -> bool:
        return False

    def advice(self, text: str) -> str:
        return "wait"

    def download(self, text: str, progress: Callable[[float, str], None]) -> None:
        try:
            while True:
                progress(0.5, "half of it")
                time.sleep(0.01)
        finally:
            self.stopped.set()


HUB = EndlessHub()


async def fetch(call: Call) -> Reply:
    steps = call.server.download(call.body.text)

    async def told() -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(steps):
            async for share, activity in steps:
                yield {"share": share, "activity": activity}

    return Reply(stream=told(), frame=NDJSON)


@frozen
class Notes:
    """A surface without generation."""

    routes: tuple[Route, ...] = (
        route("/notes", body=Note),
        route("/notes/{note:str}", method="GET"),
        route("/notes/{note:str}", method="DELETE"),
        route("/", method="HEAD"),
        route("/ask/{question:str}", ask, body=Note),
        route("/count", count, method="GET"),
        route("/fetch", fetch, body=Note),
        route("/v1/models", method="GET", header="x-note"),
        GenerationRoute(path="/tell", name="tell", summary="Tell", body=Tale, requests=tell, assemble=teller),
    )
    name: str = "notes"
    api_version: int = 1
    request_id_header: str | None = "X-Note-Id"
    takes_any_type: bool = True

    def error(self, error: ErrorAnswer) -> Reply:
        status = 529 if error.status == 404 else None
        return Reply({"type": "error", "note": error.code, "id": error.request_id}, status=status)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with the surface."""
    folder = tmp_path_factory.mktemp("notes")
    scripts = {
        "hello": write_script(folder / "hello.json", ["Hel", "lo"]),
        "slow": write_script(folder / "slow.json", ["a", {"delay_s": 0.02}], loop=True),
    }
    settings = Settings(
        auth=AuthSettings(keys=KEYS),
        models={name: ModelSettings(source=source, backend="scripted") for name, source in scripts.items()},
        plugins=PluginsSettings(allow=()),
    )
    registry = evolve(PluginRegistry.for_settings(settings), surfaces={"notes": Notes()}, model_hubs={"endless": HUB})
    with (
        server_thread(settings, registry) as running,
        httpx.Client(base_url=running.url, timeout=20, headers=ALICE) as client,
    ):
        while client.get("/health").json()["status"] != "ok":
            time.sleep(0.02)
        yield client


def test_a_call_holds_the_request(client: httpx.Client) -> None:
    sent = {"X-NOTE": "1", "cookie": "a=b", "x-api-key": "x"}
    posted = client.post("/notes?a=1&b=&a=2", json={"text": "Hi", "color": "red", "size": 1}, headers=sent)
    shown = client.get("/notes/7").json()

    assert posted.json() == {
        "text": "Hi",
        "path": {},
        "query": {"a": "1,2", "b": ""},
        "headers": {"X-Note": "1", "Authorization": None, "x-api-key": None, "Cookie": None},
        "caller": ["alice", "alice", ["admin", "infer"]],
    }
    assert posted.headers["x-note"] == "kept" and posted.headers["x-enginehouse-ignored"] == "size, color"
    assert shown["path"] == {"note": "7"} and shown["text"] is None


def test_a_surface_may_name_the_id_and_take_any_type(client: httpx.Client) -> None:
    """A web page, which sends its origin, must still name the type; other surfaces have neither."""
    as_form = {"content-type": "application/x-www-form-urlencoded"}
    answers = [client.get("/notes/7"), client.get("/notes/7/more"), client.post("/tell", json={})]
    answers.append(client.post("/notes", content='{"text": "Hi"}', headers=as_form))

    assert [answer.status_code for answer in answers] == [200, 529, 200, 200]
    assert all(answer.headers["x-note-id"] == answer.headers["x-request-id"] for answer in answers)
    of_page = {**as_form, "origin": "http://127.0.0.1"}
    assert client.post("/notes", content='{"text": "Hi"}', headers=of_page).status_code in (403, 415)
    other = client.post("/v1/completions", content="{}", headers=as_form)
    assert other.status_code == 415 and "x-note-id" not in other.headers


def test_a_download_ends_with_its_client(client: httpx.Client) -> None:
    with client.stream("POST", "/fetch", json={"text": "endless/model"}) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)) == {"share": 0.5, "activity": "half of it"}
        assert not HUB.stopped.is_set()

    assert HUB.stopped.wait(60)


@pytest.mark.parametrize(("text", "headers", "status"), [("endless/x", BOB, 403), ("other", ALICE, 400)], ids=str)
def test_downloads_are_for_admins_and_ids_of_hubs(
    client: httpx.Client, text: str, headers: dict[str, str], status: int
) -> None:
    assert client.post("/fetch", json={"text": text}, headers=headers).status_code == status


def test_every_method_is_served(client: httpx.Client) -> None:
    deleted, headed = client.delete("/notes/7"), client.head("/notes/7")

    assert deleted.json()["path"] == {"note": "7"}
    assert (headed.status_code, headed.content) == (200, b"") and headed.headers["x-note"] == "kept"
    assert client.head("/").headers["x-note"] == "kept" and client.get("/").status_code == 405


def test_a_surface_may_change_the_status_of_an_error(client: httpx.Client) -> None:
    response = client.get("/notes/7/more")

    assert response.status_code == 529
    assert response.json() == {"type": "error", "note": "not_found", "id": response.headers["x-request-id"]}
    assert client.put("/notes/7").status_code == 405 and client.put("/notes/7").json()["note"] == "method_not_allowed"


def test_a_header_chooses_between_surfaces_with_one_address(client: httpx.Client) -> None:
    with_header = {"x-note": "1"}

    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get("/v1/models", headers=with_header).json()["headers"]["X-Note"] == "1"
    assert client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/models/none", headers=with_header).json()["note"] == "model_not_found"


def test_a_stream_names_its_events(client: httpx.Client) -> None:
    whole, broken = client.get("/count"), client.get("/count?fail=1")

    assert whole.headers["content-type"] == SSE.media_type
    assert whole.text.split("\n\n") == [
        'event: number\ndata: {"type":"number","n":1}',
        'event: number\ndata: {"type":"number","n":2}',
        'data: {"n":3}',
        "",
    ]
    event, data = broken.text.strip().split("\n\n")[1].split("\n")
    assert (event, json.loads(data.removeprefix("data: "))["note"]) == ("event: error", "plugin_failed")


@pytest.mark.parametrize(
    ("chunk", "name"),
    [
        (b'{"type":"y","a":1}', "y"),
        (b'{"type":"\xc3\xa9","a":1}', "\xe9"),
        (b'{"type":"\\u0079\\u0022"}', 'y"'),
        (b'{ "type" : "y"}', "y"),
        (b'{"a":{"type":"x"},"type":"y"}', "y"),
        (b'{"type":""}', ""),
        (b'{"a":{"type":"x"}}', ""),
    ],
)
def test_prepared_chunks_have_names_too(chunk: bytes, name: str) -> None:
    line = f"event: {name}\n" if name else ""

    assert write_chunks(NAMED, [chunk]) == line.encode() + b"data: " + chunk + b"\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({}, ["stop", None, None]),
        ({"stop": "l"}, ["stop", "l", None]),
        ({"max_tokens": 1}, ["length", None, "max_tokens"]),
    ],
)
def test_an_assembler_gets_the_reason_of_the_end_and_the_usage(
    client: httpx.Client, body: dict[str, Any], end: list[Any], stream: bool
) -> None:
    response = client.post("/tell", json={**body, "stream": stream}, headers={"x-request-id": "tale"})
    told = json.loads(next(line for line in response.text.splitlines() if "{" in line).removeprefix("data: "))
    *stages, first_token_s, total_s = told["times"]

    assert told["id"] == "tale" and told["end"] == end
    assert told["tokens"] == told["counts"][1]
    assert told["first"][:2] == [told["counts"][0], 1]
    assert 0 < first_token_s <= total_s and sum(stages) <= total_s


@pytest.mark.parametrize(
    ("question", "body", "answer"),
    [
        ("models", {}, {"data": [["hello", "ready", True], ["slow", "ready", True]]}),
        ("model", {"model": "hello"}, {"name": "hello", "task": "generate", "stop": True}),
        ("tokens", {"model": "hello", "text": "Hello"}, {"count": 5, "text": "Hello"}),
        ("pin", {"model": "hello"}, {"pinned": [True, False]}),
        ("reload", {"model": "hello"}, {"states": ["unloaded", "ready"]}),
    ],
)
def test_core_answers_a_surface(client: httpx.Client, question: str, body: dict[str, Any], answer: Any) -> None:
    assert client.post(f"/ask/{question}", json={"text": "Hi", **body}).json() == answer


def test_counted_tokens_are_those_of_a_request(client: httpx.Client) -> None:
    counted = client.post("/ask/count", json={"text": "Hi"}).json()["count"]
    chat = {"messages": [{"role": "user", "content": "Hi"}]}

    assert counted == client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]
    assert client.post("/ask/defaults", json={"text": "Hi"}).json()["temperature"] == 1.0


@pytest.mark.parametrize(
    ("question", "body", "code"),
    [
        ("model", {"model": "slow"}, "model_not_found"),
        ("tokens", {"model": "slow"}, "model_not_found"),
        ("count", {"model": "slow"}, "model_not_found"),
        ("pin", {"model": "hello"}, "insufficient_scope"),
        ("reload", {"model": "hello"}, "insufficient_scope"),
    ],
)
def test_core_answers_by_the_key_of_the_caller(
    client: httpx.Client, question: str, body: dict[str, Any], code: str
) -> None:
    response = client.post(f"/ask/{question}", json={"text": "Hi", **body}, headers=BOB)

    assert response.json()["note"] == code
    assert client.post("/ask/models", json={"text": ""}, headers=BOB).json()["data"] == [["hello", "ready", True]]


def test_running_requests_are_those_of_the_caller(client: httpx.Client) -> None:
    body = {"model": "slow", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}

    def ids(headers: dict[str, str]) -> list[str]:
        return client.post("/ask/requests", json={"text": ""}, headers=headers).json()["data"]

    def cancelled(headers: dict[str, str]) -> tuple[int, str | None]:
        response = client.post("/ask/cancel", json={"text": request_id}, headers=headers)
        return response.status_code, response.json().get("note")

    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]

        assert ids(ALICE) == [request_id] and ids(BOB) == []
        assert cancelled(BOB) == (529, "request_not_running")
        assert cancelled(ALICE) == (202, None)
        assert "request_cancelled" in "".join(lines)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"scope": "admin"}, "different scopes or limits"), ({"header": None}, "both have /v1/models; leave one")],
)
def test_routes_that_share_an_address_must_fit(change: dict[str, Any], reason: str) -> None:
    one, other = route("/v1/models", method="GET"), route("/v1/models", method="GET", header="x-note")
    surfaces = [Notes((one,), "one"), Notes((evolve(other, **change),), "other")]

    with pytest.raises(ConfigError, match=reason):
        Surfaces(surfaces, None)


def test_a_body_must_be_a_class() -> None:
    with pytest.raises(PluginError, match="must be an attrs class or None"):
        Registration().register(KINDS["surfaces"], "notes", Notes((route("/notes", body=dict),)))
