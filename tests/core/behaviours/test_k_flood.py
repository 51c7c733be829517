"""Group K under a flood: 50 long prompts at once while a stream runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import httpx
import pytest

from enginehouse_testkit.server import started_server

from .client import Server, check_client_error, read_events

pytestmark = [pytest.mark.llamacpp, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS, MAX_QUEUE, SLOTS, CONTEXT = 50, 8, 4, 512
LONG = "The harbour lay quiet under the fog, and nobody spoke of the night before. " * 28  # nearly the whole context
MAX_SILENCE_S = 30.0
"""Between two tokens of the running stream; on two cores that also run the clients, and perhaps others."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few slots and a short queue."""
    config = tmp_path_factory.mktemp("narrow") / "enginehouse.toml"
    config.write_text(
        f"[limits]\nmax_queue = {MAX_QUEUE}\n"
        f'[models.m]\nsource = "starter"\nslots = {SLOTS}\ncontext = {CONTEXT}\ncache_tokens = 2048\nthreads = 1\n',
        encoding="utf-8",
    )
    with started_server("--config", config) as process:
        server = Server.connect(process.url or "", "m")
        server.client.timeout = httpx.Timeout(500)
        with server.client:
            yield server.wait_ready()
        assert "Traceback" not in process.output


def run_stream(server: Server, started: Event) -> tuple[list[float], str]:
    """A stream of 300 tokens: when each came, and why it ended."""
    times, data = [], b""
    body = server.completion_body(prompt="Once upon a time", stream=True, max_tokens=300, ignore_eos=True)
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for chunk in response.iter_raw():
            data += chunk
            times.append(time.perf_counter())
            started.set()
    return times, next(e["choices"][0]["finish_reason"] for e in reversed(read_events(data)) if e["choices"])


def ask(server: Server, number: int) -> httpx.Response:
    """One long prompt, every second one streamed."""
    body = server.completion_body(prompt=f"{number}: {LONG}", max_tokens=4, stream=bool(number % 2))
    return server.post("/v1/completions", body)


def test_h33_50_long_prompts_are_answered_or_refused_and_a_stream_goes_on(narrow: Server) -> None:
    started = Event()
    with ThreadPoolExecutor(NUM_REQUESTS + 1) as pool:
        running = pool.submit(run_stream, narrow, started)
        assert started.wait(60)
        flood_began = time.perf_counter()
        responses = list(pool.map(lambda number: ask(narrow, number), range(NUM_REQUESTS)))
        times, reason = running.result()

    answered = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code != 200]
    assert len(answered) >= MAX_QUEUE
    assert refused, "the queue holds fewer than were sent"
    for response in refused:
        assert check_client_error(response, status=429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
    for response in answered:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert read_events(response.content)
        else:
            assert json.loads(response.content)["usage"]["completion_tokens"] >= 1
    assert reason == "length"
    during = [moment for moment in times if moment > flood_began]
    assert max(after - before for before, after in pairwise(times)) < MAX_SILENCE_S
    assert len(during) > 20
    narrow.check_alive()
