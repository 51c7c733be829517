"""A plugin that does not return, in a running server: no other request waits, its own ends with the plugin's name.

One installed plugin registers an object of each kind that is called while requests are served. Each place waits for a
file: the tests create it, or never do.
"""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import frozen

from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

HELD = """
import json, os, threading, time
import enginehouse
from attrs import field, frozen
from pathlib import Path
from enginehouse.contract.backend import Match, MemoryEstimate, Probe
from enginehouse.contract.parsers import AnswerText, PreparedChat
from enginehouse.contract.preparer import Preparation, Report
from enginehouse.contract.router import Acceptance, Attempt, RoutingDecision
from enginehouse.contract.surface import ReplyRoute, GenerationRoute, NDJSON, Reply, new_id
from enginehouse.contract.types import Constraint, GenerateRequest, Message

FOLDER = Path(os.environ["HELD_FOLDER"])

def hold(place, wanted=None):
    if wanted not in (None, place) or not (FOLDER / "armed").exists():  # a model is loaded before that
        return
    (FOLDER / f"{place}.entered").touch()
    if "HELD_FOREVER" in os.environ:
        threading.Event().wait()
    while not (FOLDER / f"{place}.released").exists():
        time.sleep(0.005)

@frozen
class Fields:
    held: str = field(default="", validator=lambda _, attribute, value: hold("fields", value))

class Parser:
    name, api_version = "held", 1
    def match(self, model):
        return 0.0
    def bind(self, model):
        return Format()

class Format:
    markers, start, end, has_switch = (), "<think>", "</think>", False
    def prepare(self, messages, tools):
        hold("prepare", tools and tools[0].name)
        return PreparedChat(messages)
    def constraint(self, tools, parallel, answer=None):
        return Constraint(kind="json_schema", text="{}", param="tools")
    def open(self, tools):
        hold("open", tools and tools[0].name)
        return Session(tools and tools[0].name)

class Session:
    def __init__(self, place):
        self.place = place
    def push(self, text):
        hold("push", self.place)
        return [AnswerText(text)] if text else []
    def flush(self, is_cut):
        hold("flush", self.place)
        return []

class ReasoningParser:
    api_version = 1
    def __init__(self, name):
        self.name = name
    def match(self, model):
        return 0.0
    def bind(self, model):
        return ReasoningFormat(self.name)

class ReasoningFormat:
    start, end, has_switch = "<think>", "</think>", False
    def __init__(self, place):
        self.place = place
    def variables(self, enabled, effort):
        hold("reasoning_variables", self.place)
        return {}
    def is_open(self, prompt):
        hold("reasoning_is_open", self.place)
        return False
    def open(self, is_open):
        return Session("push" if self.place == "reasoning_push" else "")

class Router:
    name, api_version = "held", 1
    def route(self, question):
        text = question.request.messages[-1].content
        hold("route", text)
        judge = Acceptance(1, lambda probe: hold("is_good", text) is None)
        return RoutingDecision(attempts=(Attempt("calm", judge), Attempt("tools")), reason="held")

class Preparer:
    name, api_version, request_fields = "held", 1, Fields
    def bind(self, settings, objects):
        return self
    def may_prepare(self, request, model):
        hold("may_prepare", request.messages and request.messages[-1].content)
        return False
    async def prepare_request(self, request, model, num_excess):
        text = request.messages and request.messages[-1].content
        if text == "asks":
            stream = await model.generate(core_request(await model.tokenize("Hi")))
            assert [batch async for batch in stream]
            async with model.other("calm") as other:
                assert await other.pieces(await other.tokenize("Hi"))
        hold("prepare_request", text)

def core_request(token_ids):
    from enginehouse.contract.types import EngineRequest, StopParams
    return EngineRequest(request_id=new_id("own-"), token_ids=tuple(token_ids), stopping=StopParams(max_tokens=2))

@frozen(kw_only=True)
class Body:
    place: str = field(default="", validator=lambda _, attribute, value: hold("body", value))
    stream: bool = False

class Assembler:
    def __init__(self, place):
        self.place, self.said = place, []
    def opening(self):
        return ()
    def push(self, piece):
        hold("assembler_push", self.place)
        self.said.append(piece.text)
        yield {"say": piece.text}
    def close(self, usage, details):
        return ()
    def fail(self, error):
        return ({"problem": error.message},)
    def whole(self, usage, details):
        hold("whole", self.place)
        return {"say": "".join(self.said)}

def requests(call):
    hold("requests", call.body.place)
    assert call.server.model("calm").name == "calm"
    messages = (Message(role="user", content="Hello"),)
    return [GenerateRequest(request_id=new_id("held-"), model="calm", messages=messages, stopping={"max_tokens": 6})]

async def assemble(call, answer):
    hold("assemble", call.body.place)
    return Assembler(call.body.place)

async def handle(call):
    hold("handle", call.body.place)
    if call.body.place == "error":
        raise ValueError("a secret of the plugin")
    async def chunks():
        yield {"n": 1}
        hold("chunks", call.body.place)
        yield {"n": len(await call.server.tokenize("Hello", "calm"))}
    if call.body.place == "chunks":
        return Reply(stream=chunks(), frame=NDJSON)
    return Reply({"models": [model.name for model in call.server.models()]})

class Surface:
    name, api_version, request_id_header, takes_any_type = "held", 1, None, False
    routes = (
        GenerationRoute(path="/held", name="held", summary="Held", body=Body, requests=requests, assemble=assemble,
                        frame=NDJSON),
        ReplyRoute(path="/plain", name="plain", summary="Plain", body=Body, handle=handle),
    )
    def error(self, error):
        if "failed in handle" in error.message:
            hold("error", "error")
        return Reply({"problem": error.message, "code": error.code})

class Compressor:
    name, api_version, is_budgeted, is_idempotent, needs_scores = "held", 1, True, True, False
    def compress(self, task, tools):
        hold("compress")
        return [text.protected for text in task.texts]

class Decoder:
    name, api_version, kinds = "held", 1, frozenset({"json_object", "json_schema"})
    def bind(self, tokenizer):
        return self
    def compile(self, constraint):
        hold("compile")
        return self
    def start(self):
        return self
    def fill_bitmask(self, bitmask):
        bitmask[:] = -1
    def accept(self, token_id):
        pass
    def forced_token_ids(self):
        return ()
    def is_finished(self):
        return False

@frozen
class EngineOptions:
    place: str

class Backend:
    name, api_version, options, opens = "held", 1, EngineOptions, "engine"
    def probe(self):
        return Probe(available=True)
    def match(self, source):
        return Match(0.0, "only by name")
    def estimate(self, source, options):
        return MemoryEstimate(1000, 0, 1000)
    def open(self, source, options, progress):
        from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
        from enginehouse_testkit.inline_engine import InlineEngine

        class Engine(InlineEngine):
            async def submit(self, request):
                hold("submit", options.place)
                return await super().submit(request)
            def step(self):
                hold("step", options.place)
                super().step()
        return Engine(FakeRunner(FakeOptions(slots=4)))

@enginehouse.hookimpl
def register_backends(register):
    register(Backend())

@enginehouse.hookimpl
def register_tool_parsers(register):
    register(Parser())

@enginehouse.hookimpl
def register_reasoning_parsers(register):
    for place in ("reasoning_variables", "reasoning_is_open", "reasoning_push"):
        register(ReasoningParser(place))

@enginehouse.hookimpl
def register_routers(register):
    register(Router())

@enginehouse.hookimpl
def register_preparers(register):
    register(Preparer())

@enginehouse.hookimpl
def register_surfaces(register):
    register(Surface())

@enginehouse.hookimpl
def register_compressors(register):
    register(Compressor())

@enginehouse.hookimpl
def register_structured_decoders(register):
    register(Decoder())
"""

CONFIG = """
[plugins]
allow = ["held_kit", "compress"]
[limits]
plugin_timeout_s = {limit}
[router]
strategy = "held"
default = "calm"
models = ["calm", "tools"]
[models.calm]
source = "."
backend = "fake"
isolation = "thread"
[models.tools]
source = "."
backend = "fake"
isolation = "thread"
tool_parser = "held"
[models.compressed]
source = "."
backend = "fake"
isolation = "thread"
[models.compressed.compressor]
method = "held"
min_tokens = 0
[models.decoder]
source = "."
backend = "fake"
[models.submit]
source = "."
backend = "held"
place = "submit"
[models.step]
source = "."
backend = "held"
place = "step"
[models.reasoning_variables]
source = "."
backend = "fake"
isolation = "thread"
reasoning_parser = "reasoning_variables"
[models.reasoning_is_open]
source = "."
backend = "fake"
isolation = "thread"
reasoning_parser = "reasoning_is_open"
[models.reasoning_push]
source = "."
backend = "fake"
isolation = "thread"
reasoning_parser = "reasoning_push"
"""


def serve(folder: Path, limit_s: float, **env: str) -> Any:
    (folder / "held_plugin.py").write_text(HELD)
    info = folder / "held_kit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: held-kit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nheld_kit = held_plugin\n")
    (folder / "config.toml").write_text(CONFIG.format(limit=limit_s))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HELD_FOLDER": str(folder), **env}
    return started_server("--config", folder / "config.toml", env=env)


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=100, trust_env=False)


def chat(model: str, text: str = "Hello", **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {
        "model": model,
        "messages": messages,
        "max_tokens": 6,
        "temperature": 0,
        **fields,
    }


def tool(name: str) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]}


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def check_others(server: ServerProcess) -> None:
    """A stream of another request is complete, and a plain route answers."""
    path, body = chat("calm")
    with httpx.stream(
        "POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=100, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        assert list(answer.iter_lines())[-2] == "data: [DONE]"
    assert httpx.get(f"{server.url}/v1/models", timeout=100, trust_env=False).status_code == 200


@frozen
class Case:
    """A request that is held at a place.

    Attributes:
        kind: of the object.
        ends: how it ends after the time limit: with the plugin's ``error``, with an ``answer`` in spite of it, or with
            the ``text`` of an answer without tools.
        method: in the message; as ``place`` unless given.
    """

    place: str
    kind: str
    request: tuple[str, dict[str, Any]]
    ends: str = "error"
    method: str = ""


CASES = [
    Case("prepare", "tool parser", chat("tools", **tool("prepare"))),
    Case("open", "tool parser", chat("tools", **tool("open")), "text"),
    Case("push", "tool parser", chat("tools", **tool("push")), "text"),
    Case("flush", "tool parser", chat("tools", **tool("flush")), "text"),
    Case("reasoning_variables", "reasoning parser", chat("reasoning_variables"), method="variables"),
    Case("reasoning_is_open", "reasoning parser", chat("reasoning_is_open"), method="is_open"),
    Case("reasoning_push", "reasoning parser", chat("reasoning_push"), method="push"),
    Case("route", "router", chat("auto", "route"), "answer"),
    Case("is_good", "router", chat("auto", "is_good"), "answer"),
    Case("may_prepare", "preparer", chat("auto", "may_prepare")),
    Case("prepare_request", "preparer", chat("calm", "prepare_request")),
    Case("fields", "preparer", chat("calm", held="fields"), method="reading of its request fields"),
    Case("body", "surface", ("/plain", {"place": "body"}), method="reading of a body"),
    Case("requests", "surface", ("/held", {"place": "requests"})),
    Case("assemble", "surface", ("/held", {"place": "assemble"})),
    Case("assembler_push", "surface", ("/held", {"place": "assembler_push", "stream": True}), method="push"),
    Case("whole", "surface", ("/held", {"place": "whole"})),
    Case("handle", "surface", ("/plain", {"place": "handle"})),
    Case("chunks", "surface", ("/plain", {"place": "chunks"}), method="stream of its reply"),
    Case("error", "surface", ("/plain", {"place": "error"})),
    Case("submit", "backend", chat("submit")),
    Case("step", "backend", chat("step"), method="its stream"),
    Case("compile", "structured decoder", chat("decoder", response_format={"type": "json_object"})),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.place)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that waits for its plugin."""
    folder = tmp_path_factory.mktemp("patient")
    with serve(folder, 300.0) as running:
        (folder / "armed").touch()
        yield running, folder


@each_case
def test_other_requests_are_answered_while_a_plugin_is_held(patient: tuple[ServerProcess, Path], case: Case) -> None:
    server, folder = patient
    place = "push" if case.place == "reasoning_push" else case.place
    released = folder / f"{place}.released"
    with ThreadPoolExecutor() as pool:
        held = pool.submit(post, server, *case.request)
        try:
            wait_until((folder / f"{place}.entered").exists)

            check_others(server)
            assert not held.done()
        finally:
            released.touch()
        response = held.result()
    for mark in folder.glob(f"{place}.*"):
        mark.unlink()
    assert response.status_code == (500 if case.place == "error" else 200), response.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``strict``."""
    return tmp_path_factory.mktemp("strict")


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[tuple[ServerProcess, dict[str, httpx.Response]]]:
    """A server with a short time limit whose plugin never returns, and the responses to all cases."""
    with serve(folder, 3.0, HELD_FOREVER="1") as running:
        (folder / "armed").touch()
        with ThreadPoolExecutor(len(CASES)) as pool:
            asked = {case.place: pool.submit(post, running, *case.request) for case in CASES}
            responses = {place: response.result() for place, response in asked.items()}
        yield running, responses


@each_case
def test_request_of_a_plugin_that_hangs_ends_with_its_name(
    strict: tuple[ServerProcess, dict[str, httpx.Response]], case: Case
) -> None:
    server, responses = strict
    response = responses[case.place]
    if case.ends == "text":
        assert text_of(response) == text_of(post(server, *chat("calm")))
    elif case.ends == "answer":
        assert response.status_code == 200 and text_of(response)
    else:
        named = f"The {case.kind} 'held' of the plugin 'held_kit'".replace("'held'", f"'{name_of(case)}'")
        assert named in response.text and (case.method or case.place) in response.text, response.text
        assert "held_plugin.py" not in response.text
    told = re.search(
        rf"the {case.kind} '{name_of(case)}' of the plugin 'held_kit'.*{case.method or case.place}", server.output
    )
    assert told, server.output
    assert re.search(r'held_plugin.py", line \d+, in hold', server.output[told.start() :]), server.output


def name_of(case: Case) -> str:
    return case.place if case.kind == "reasoning parser" else "held"


def test_server_counts_plugins_that_hang_lives_and_stops(
    strict: tuple[ServerProcess, dict[str, httpx.Response]], folder: Path
) -> None:
    server, _ = strict
    check_others(server)
    post(server, *chat("decoder"))  # a worker reports its counts with its steps

    def counts() -> str:
        return httpx.get(f"{server.url}/metrics", timeout=100, trust_env=False).text

    for kind in dict.fromkeys(case.kind for case in CASES):
        line = f'enginehouse_plugin_failures_total{{kind="{kind}",plugin="held_kit"}}'
        wait_until(lambda line=line: line in counts(), line)
    path, body = chat("compressed", compression=True)
    body["messages"].insert(0, {"role": "user", "content": "A text to compress. " * 40})
    client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]))
    client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    wait_until((folder / "compress.entered").exists)
    client.close()
    assert server.stop() == 0
