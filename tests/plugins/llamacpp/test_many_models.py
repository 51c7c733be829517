"""Two real models in memory for one, through a real server: each answers, and its memory is given back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.server import ServerProcess, started_server

pytestmark = [pytest.mark.llamacpp, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

OPTIONS = LlamaCppOptions(context=512, slots=2, cache_tokens=1024, threads=1)
CONFIG = """
[limits]
memory_budget = {budget}

[models.first]
source = "{path}"
backend = "llamacpp"
context = 512
slots = 2
cache_tokens = 1024
threads = 1

[models.second]
source = "{path}"
backend = "llamacpp"
context = 512
slots = 2
cache_tokens = 1024
threads = 1
defaults = {{temperature = 0}}
aliases = ["spare"]
"""


@pytest.fixture(scope="module")
def server(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SmolLM2 under two names, with a budget for one and a half."""
    size = LlamaCppBackend().estimate(ModelSource(str(smollm_path), smollm_path), OPTIONS).total_bytes
    config = tmp_path_factory.mktemp("many") / "enginehouse.toml"
    config.write_text(CONFIG.format(path=smollm_path, budget=int(1.5 * size)), encoding="utf-8")
    with started_server("--config", config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(server.url), timeout=120) as opened:
        yield opened


def ask(client: httpx.Client, model: str, max_tokens: int = 8) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Count to five."}], "max_tokens": max_tokens}
    answer = client.post("/v1/chat/completions", json={**body, "temperature": 0})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in client.get("/admin/models").json()["data"]}


def workers(server: ServerProcess) -> list[int]:
    """Process ids of the models' workers."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "enginehouse.workers" in line]


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_each_of_two_models_answers_in_memory_for_one(server: ServerProcess, client: httpx.Client) -> None:
    assert states(client) == {"first": "ready", "second": "unloaded"}
    texts = set()
    for model, other in (("first", "second"), ("spare", "first"), ("first", "second"), ("second", "first")):
        texts.add(ask(client, model))
        assert states(client) == {"second" if model == "spare" else model: "ready", other: "unloaded"}
        assert len(workers(server)) == 1

    assert len(texts) == 1, "they are the same model"


def test_requests_to_both_at_once_are_all_answered(client: httpx.Client) -> None:
    models = ["first", "second"] * 4
    with ThreadPoolExecutor(len(models)) as pool:
        texts = list(pool.map(lambda model: ask(client, model), models))

    assert len(set(texts)) == 1
    assert list(states(client).values()).count("ready") == 1


def test_unloaded_model_gives_all_its_memory_back(server: ServerProcess, client: httpx.Client) -> None:
    ask(client, "first")
    (pid,) = workers(server)
    held = rss_bytes(pid)
    before = rss_bytes(server.process.pid)
    answer: dict[str, Any] = client.post("/admin/models/first/unload", json={}).json()
    deadline = time.monotonic() + 60
    while workers(server) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert answer["state"] == "unloaded"
    assert client.get("/admin/models").json()["memory"]["cpu"]["held_bytes"] == 0
    assert held > 50e6
    assert workers(server) == []
    assert not Path(f"/proc/{pid}").exists()
    assert rss_bytes(server.process.pid) < before + 20e6
