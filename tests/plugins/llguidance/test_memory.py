"""Compiled constraints take no more memory than the settings say, and give it back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from enginehouse_testkit.server import started_server

linux = pytest.mark.skipif(sys.platform != "linux", reason="other allocators give memory back by themselves, or not")

_CONFIG = """
[models.fake]
source = "fake"
backend = "fake"

[plugins]
allow = ["llguidance", "parsers"]

[plugins.llguidance]
max_cached_bytes = {max_cached_bytes}
"""


def nested(seed: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for depth in range(50):
        extra = {"type": "array", "items": {"type": "string"}}
        schema = {"type": "object", "properties": {f"n{seed}_{depth}": schema, "z": extra}}
    return schema


def bombs(seed: int) -> Iterator[dict[str, Any]]:
    """Large ones that are compiled, each time other ones, and one that is refused after it was compiled."""
    yield nested(seed)
    yield {"enum": [f"value {seed} {index}" for index in range(15_000)]}
    yield {
        "anyOf": [
            {"type": "object", "properties": {f"p{seed}_{index}": {"const": index}}, "required": [f"p{seed}_{index}"]}
            for index in range(800)
        ]
    }
    yield {"type": "object", "properties": {f"k{seed}_{index}": {"type": "string"} for index in range(3000)}}
    yield {"allOf": [{"anyOf": [{"minimum": 100 * seed + i + j} for i in range(10)]} for j in range(8)]}


def small(seed: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "integer", "maximum": seed}}}


@pytest.fixture(params=[pytest.param(1_000_000, marks=pytest.mark.slow), 33_554_432])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[httpx.Client, dict[str, psutil.Process]]]:
    config = tmp_path / "enginehouse.toml"
    config.write_text(_CONFIG.format(max_cached_bytes=request.param), encoding="utf-8")
    with started_server("--config", config) as server, httpx.Client(base_url=server.url or "", timeout=120) as client:
        process = psutil.Process(server.process.pid)
        workers = [child for child in process.children(recursive=True) if "worker" in " ".join(child.cmdline())]
        assert len(workers) == 1
        yield client, {"worker": workers[0], "server": process}


def ask(client: httpx.Client, schema: dict[str, Any]) -> int:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    return client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON).status_code


JSON = {"content-type": "application/json"}


@linux
def test_memory_comes_back_after_bombs(running: tuple[httpx.Client, dict[str, psutil.Process]]) -> None:
    client, processes = running
    for schema in bombs(1000):  # what is imported and set up by the first one of each kind stays
        ask(client, schema)
    for number in range(150):
        assert ask(client, small(number)) == 200
    before = {name: process.memory_info().rss for name, process in processes.items()}
    statuses = {ask(client, schema) for seed in range(6) for schema in bombs(seed)}
    for number in range(150):  # more than are kept: the bombs are thrown out
        assert ask(client, small(1000 + number)) == 200
    after = {name: process.memory_info().rss for name, process in processes.items()}

    assert statuses == {200, 400}
    for name, num_bytes in after.items():
        assert num_bytes < 1.05 * before[name], (name, before[name] / 1e6, num_bytes / 1e6)
