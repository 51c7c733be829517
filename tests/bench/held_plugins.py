"""Requests of others while plugins block: an authenticator, a parser, a router, a surface and an engine that sleep.

One server with a plugin of another distribution. Each round times the same requests of a static key without and with
clients at one of its places, in turn, so that both see the same machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen
from rich.console import Console

from .peers import running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_plugins"]

_NUM_REQUESTS = 40
_LATENCY = "median of a request, ms"
_ALONE = "no other client"
_STRANGERS = 60
_MAX_OF_STRANGERS = 1.2
_MAX_OF_OTHERS = 1.1
_KEY = {"Authorization": "Bearer static"}

_PLUGIN = """
import time
import enginehouse
from attrs import frozen
from enginehouse.contract.backend import Match, MemoryEstimate, Probe
from enginehouse.contract.parsers import AnswerText, PreparedChat
from enginehouse.contract.router import Attempt, RoutingDecision
from enginehouse.contract.surface import ReplyRoute, Reply
from enginehouse.contract.types import Constraint

class Parser:
    name, api_version, markers = "sleeper", 1, ()
    def match(self, model):
        return 0.0
    def bind(self, model):
        return self
    def prepare(self, messages, tools):
        return PreparedChat(messages)
    def constraint(self, tools, parallel, answer=None):
        return Constraint(kind="json_schema", text="{}", param="tools")
    def open(self, tools):
        return Session()

class Session:
    def push(self, text):
        time.sleep(1.0)
        return [AnswerText(text)] if text else []
    def flush(self, is_cut):
        return []

class Router:
    name, api_version = "sleeper", 1
    def route(self, question):
        time.sleep(1.0)
        return RoutingDecision(attempts=(Attempt("script"),), reason="slept")

async def handle(call):
    time.sleep(1.0)
    return Reply({})

class Surface:
    name, api_version, request_id_header, takes_any_type = "sleeper", 1, None, False
    routes = (ReplyRoute(method="GET", path="/sleep", name="sleep", summary="Sleep", handle=handle),)
    def error(self, error):
        return Reply({"error": error.message})

@frozen
class EngineOptions:
    pass

class Backend:
    name, api_version, options, opens = "sleeper", 1, EngineOptions, "engine"
    def probe(self):
        return Probe(available=True)
    def match(self, source):
        return Match(0.0, "only by name")
    def estimate(self, source, options):
        return MemoryEstimate(0, 0, 0)
    def open(self, source, options, progress):
        from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
        from enginehouse_testkit.inline_engine import InlineEngine

        class Engine(InlineEngine):
            def step(self):
                time.sleep(1.0)
                super().step()

        return Engine(FakeRunner(FakeOptions(slots=8)))

@enginehouse.hookimpl
def register_backends(register):
    register(Backend())

@enginehouse.hookimpl
def register_tool_parsers(register):
    register(Parser())

@enginehouse.hookimpl
def register_routers(register):
    register(Router())

@enginehouse.hookimpl
def register_surfaces(register):
    register(Surface())

@enginehouse.hookimpl
def authenticate(credentials):
    time.sleep(5.0)
    return None
"""

_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@frozen
class _Server:
    """Ours with a plugin of another distribution, replaying a script."""

    name: str = "enginehouse (scripted)"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        """See :class:`bench.peers.Peer`."""
        script, config, info = folder / "script.json", folder / "held.toml", folder / "sleeper_kit-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeper-kit\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[enginehouse]\nsleeper_kit = sleeper_kit\n")
        (folder / "sleeper_kit.py").write_text(_PLUGIN)
        script.write_text(json.dumps({"tokens": [{"text": " word"}, {"text": " and"}], "loop": True}))
        model = f'source = "{script.resolve()}"\nbackend = "scripted"\nslots = 32\n'
        config.write_text(
            '[auth]\nkeys = [{name = "static", key = "static"}]\nauthenticators = ["sleeper_kit"]\n'
            '[router]\nstrategy = "sleeper"\n'
            f'[models.script]\n{model}[models.tools]\n{model}tool_parser = "sleeper"\n'
            '[models.engine]\nsource = "."\nbackend = "sleeper"\n'
        )
        path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
        serve = [sys.executable, "-m", "enginehouse", "serve", "--config", str(config.resolve()), "--port", str(port)]
        return ["env", f"PYTHONPATH={path}", *serve]


def _chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 64, "messages": [{"role": "user", "content": "Go."}], **fields}


def _ask(client: httpx.Client, what: str) -> None:
    """Send one request of those that disturb."""
    if what == "strangers":
        client.get("/v1/models", headers={"Authorization": f"Bearer {time.monotonic()}"})
    elif what == "parser":
        client.post("/v1/chat/completions", json={**_chat("tools", tools=_TOOLS), "max_tokens": 4}, headers=_KEY)
    elif what == "engine":
        client.post("/v1/chat/completions", json={**_chat("engine"), "max_tokens": 4}, headers=_KEY)
    elif what == "router":
        client.post("/v1/chat/completions", json=_chat("auto"), headers=_KEY)
    else:
        client.get("/sleep", headers=_KEY)


@contextmanager
def _clients(url: str, what: str, number: int) -> Iterator[None]:
    """Keep ``number`` requests open at a place of the plugin."""
    is_over = threading.Event()

    def keep_asking() -> None:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            while not is_over.is_set():
                _ask(client, what)
                is_over.wait(0.2)  # those that are refused at once do not become a flood

    threads = [threading.Thread(target=keep_asking) for _ in range(number)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _latency_ms(client: httpx.Client) -> float:
    times_s: list[float] = []
    for _ in range(_NUM_REQUESTS):
        began = time.perf_counter()
        client.post("/v1/chat/completions", json=_chat("script"), headers=_KEY).raise_for_status()
        times_s.append(time.perf_counter() - began)
    return 1000 * statistics.median(times_s)


def measure_plugins(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Latency of a static key's requests beside blocking plugins, over that of the same requests without them."""
    record, places = Record(), {"strangers": _STRANGERS, "parser": 8, "router": 8, "surface": 8, "engine": 8}
    with (
        running(_Server(), plan.folder / "logs") as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
    ):
        _latency_ms(client)  # warm-up
        for number in range(plan.num_rounds):
            for what, num_clients in places.items():
                record.add(Key(what, _ALONE, _LATENCY), _latency_ms(client))
                with _clients(server.url, what, num_clients):
                    record.add(Key(what, f"{num_clients} clients", _LATENCY), _latency_ms(client))
            console.print(f"round {number + 1}/{plan.num_rounds}")
    return record, [
        Comparison(
            Key(what, f"{num_clients} clients", _LATENCY),
            Key(what, _ALONE, _LATENCY),
            target=_MAX_OF_STRANGERS if what == "strangers" else _MAX_OF_OTHERS,
            target_is_upper=True,
        )
        for what, num_clients in places.items()
    ]
