"""The HTTP layer alone: the instant scripted engine behind it, the server on one core and the client on another."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attrs import frozen
from rich.console import Console

from .event_counter import SURFACES, count_events
from .machine import on_cores, usable_cores
from .peers import Peer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_http"]

_NUM_STREAMS = 64
_TARGET_EVENTS_PER_S = 50_000
_SCENARIO = f"{_NUM_STREAMS} streams"
_EVENTS = "events/s"
_EVENTS_PER_CPU_S = "events/s of CPU time"
_SURFACE_TARGET = 0.8
"""Share of the events of OpenAI's chats that each other API should reach."""


@frozen
class _ScriptedEnginehouse:
    """Ours, replaying a script: everything but the model is real."""

    name: str = "enginehouse (scripted)"
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        script, config = folder / "script.json", folder / "scripted.toml"
        script.write_text(json.dumps({"tokens": [{"text": " word"}, {"text": " and"}], "loop": True}))
        config.write_text(
            f'[models.script]\nsource = "{script.resolve()}"\nbackend = "scripted"\nslots = {_NUM_STREAMS}\n'
        )
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config.resolve()), "--port", str(port)]


@frozen
class _BareLitestar:
    """Litestar on uvicorn writing fixed bytes, ``at_once`` or ``in_turns``."""

    app: str
    name: str
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "uvicorn",
            f"bench.bare_server:{self.app}",
            "--port",
            str(port),
            "--no-access-log",
        ]


def measure_http(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Events per second over 64 streams: beside a server that does no work at all, and of each API beside chats."""
    cores = usable_cores()
    server_core, client_core = cores[:1], cores[1:2] or cores
    record = Record()
    max_tokens = 200 if plan.quick else 2000
    peers: list[Peer] = [
        _ScriptedEnginehouse(),
        _BareLitestar("at_once", "bare Litestar"),
        _BareLitestar("in_turns", "bare Litestar, in turns"),
    ]
    for round_number, peer in plan.interleave(peers):
        with running(peer, plan.folder / "logs", server_core) as server, on_cores(client_core):
            count_events(server.url, _NUM_STREAMS, max_tokens // 4)  # warm-up
            before_s = server.cpu_seconds()
            count = count_events(server.url, _NUM_STREAMS, max_tokens)
            server_cpu_s = server.cpu_seconds() - before_s
            if peer is peers[0]:
                for surface in SURFACES:
                    before_s = server.cpu_seconds()
                    counted = count_events(server.url, _NUM_STREAMS, max_tokens // 2, surface)
                    cpu_s = server.cpu_seconds() - before_s
                    record.add(Key(_SCENARIO, surface.name, _EVENTS), counted.events_per_s)
                    record.add(Key(_SCENARIO, surface.name, _EVENTS_PER_CPU_S), counted.num_events / cpu_s)
        values = {
            _EVENTS: count.events_per_s,
            _EVENTS_PER_CPU_S: count.num_events / server_cpu_s,
            "server core in use, %": 100 * server_cpu_s / count.wall_s,
            "client core in use, %": 100 * count.client_cpu_s / count.wall_s,
        }
        for metric, value in values.items():
            record.add(Key(_SCENARIO, peer.name, metric), value)
        console.print(f"round {round_number + 1}/{plan.num_rounds}  {peer.name}: {count.events_per_s:,.0f} events/s")
    ours, *bare = (Key(_SCENARIO, peer.name, _EVENTS) for peer in peers)
    chat, *others = (Key(_SCENARIO, surface.name, _EVENTS) for surface in SURFACES)
    return record, [
        Comparison(ours, target=_TARGET_EVENTS_PER_S),
        *(Comparison(ours, key) for key in bare),
        *(Comparison(key, chat, target=_SURFACE_TARGET) for key in others),
    ]
