"""A chat model and an embedding model in one server, under one memory budget: each alone, then both at once.

Each is asked by clients that send the next request when they have the last response: two chats, two requests of 64
texts, and one client with single texts, whose latency beside the bulk shows whether short requests wait.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from attrs import frozen
from rich.console import Console

from .model_file import find_embedding_folder
from .peers import running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_beside"]

_CHAT, _TEXTS = "chat, tokens/s", "embeddings, texts/s"
_LATENCIES = {"one text, p50 ms": 0.5, "one text, p95 ms": 0.95}
_ALONE, _BULK, _TOGETHER = "alone", "beside bulk embeddings", "beside each other"
_SHARE = 0.25
"""Of the rate alone: half of the processors each would give 0.5."""

_BULK_TEXTS = 64
_WORDS = "the quick brown fox jumps over a lazy dog while it rains on the old harbour"


@frozen
class _Both:
    """A server with both models, whose budget leaves no room for a third one."""

    chat: Path
    embedder: Path
    name: str = "enginehouse"
    ready_path: str = "/v1/models/embedder"

    def command(self, port: int, folder: Path) -> list[str]:
        config = folder / "beside.toml"
        models = (
            f'[models.chat]\nsource = "{self.chat}"\ncontext = 2048\n[models.embedder]\nsource = "{self.embedder}"\n'
        )
        config.write_text(f'[limits]\nmemory_budget = "2GiB"\n{models}')
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


class _Load:
    """Clients in threads, each of which calls a function until the end and adds what it returns."""

    def __init__(self, url: str, end_s: float) -> None:
        self._url, self._end_s = url, end_s
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def add(self, ask: Callable[[httpx.Client, int], float], num_clients: int) -> list[float]:
        """Start clients; returns the list to which they append."""
        found: list[float] = []

        def run(client_number: int) -> None:
            try:
                with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client:
                    number = client_number
                    while time.perf_counter() < self._end_s:
                        found.append(ask(client, number))
                        number += num_clients
            except Exception as error:  # noqa: BLE001 - raised by `wait`
                self._errors.append(error)

        for number in range(num_clients):
            self._threads.append(threading.Thread(target=run, args=(number,)))
            self._threads[-1].start()
        return found

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def _chat(client: httpx.Client, number: int) -> float:
    """Return the tokens of a response."""
    messages = [{"role": "user", "content": f"Tell story number {number}."}]
    body = {"model": "chat", "messages": messages, "max_tokens": 64, "ignore_eos": True}
    return float(_post(client, "/v1/chat/completions", body)["usage"]["completion_tokens"])


def _embed(client: httpx.Client, number: int) -> float:
    """Return the number of texts, no two of which are equal."""
    texts = [f"{number} {index} {_WORDS} {_WORDS}" for index in range(_BULK_TEXTS)]
    return float(len(_post(client, "/v1/embeddings", {"model": "embedder", "input": texts})["data"]))


def _embed_one(client: httpx.Client, number: int) -> float:
    """Return milliseconds."""
    began_s = time.perf_counter()
    _post(client, "/v1/embeddings", {"model": "embedder", "input": f"question {number}: {_WORDS}"})
    return 1000 * (time.perf_counter() - began_s)


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path.endswith("embeddings"):
        body = {**body, "encoding_format": "base64"}
    response = client.post(path, json=body)
    response.raise_for_status()
    answer: dict[str, Any] = json.loads(response.content)
    return answer


def measure_beside(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Rates of both models alone and together, and the latency of single texts beside bulk requests and chats."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    record, seconds = Record(), 4.0 if plan.quick else 20.0
    with running(_Both(plan.model_file, find_embedding_folder()), plan.folder / "logs") as server:
        _await_both(server.url)
        for round_number in range(plan.num_rounds):
            for load, has_chat, has_bulk, has_single in (
                ("chat alone", True, False, False),
                ("bulk alone", False, True, False),
                ("single alone", False, False, True),
                (_BULK, False, True, True),
                (_TOGETHER, True, True, True),
            ):
                condition = _ALONE if load.endswith("alone") else load
                began_s = time.perf_counter()
                clients = _Load(server.url, began_s + seconds)
                tokens = clients.add(_chat, 2) if has_chat else []
                texts = clients.add(_embed, 2) if has_bulk else []
                latencies = clients.add(_embed_one, 1) if has_single else []
                clients.wait()
                wall_s = time.perf_counter() - began_s
                if has_chat:
                    record.add(Key(condition, "enginehouse", _CHAT), sum(tokens) / wall_s)
                if has_bulk:
                    record.add(Key(condition, "enginehouse", _TEXTS), sum(texts) / wall_s)
                if has_single:
                    for metric, share in _LATENCIES.items():
                        record.add(Key(condition, "enginehouse", metric), float(np.quantile(latencies, share)))
            console.print(f"round {round_number + 1}/{plan.num_rounds}")
    return record, [
        Comparison(Key(_TOGETHER, "enginehouse", metric), Key(_ALONE, "enginehouse", metric), target=_SHARE)
        for metric in (_CHAT, _TEXTS)
    ]


def _await_both(url: str) -> None:
    """Ask until both models answer: the server listens before they are loaded."""
    deadline_s = time.monotonic() + 120
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for ask in (_chat, _embed_one):
            while True:
                try:
                    ask(client, 0)
                    break
                except httpx.HTTPStatusError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.5)
