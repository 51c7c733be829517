"""Constraints made to take long: bounded in time and memory, and without effect on what else the model does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

pytestmark = pytest.mark.llguidance

CONFIG = """
[models.m]
source = "{source}"
backend = "fake"
context = 4096
step_delay_s = 0.01

[plugins]
allow = ["llguidance"]
"""
MAX_GAP_S = 5.0
"""What a stream may stand still on a busy machine; without bounds these bombs take minutes."""
MAX_BYTES = 1_500_000_000

_DEEP = "(" * 3000 + '"a"' + ")" * 3000
_TREE = "\n".join(f"a{n}: a{n + 1} a{n + 1} a{n + 1}" for n in range(12)) + '\na12: "x"\n'
_WIDE = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": "^a{1,50}$"} for n in range(1500)},
}
BOMBS = {
    "nested": {"guided_regex": "((a{99}){99}){99}"},
    "alternatives": {"guided_regex": "|".join(f"k{n}[a-z]*z{n}" for n in range(2000))},
    "many_states": {"guided_regex": "([a-z ]*[aeiou][a-z ]{30})*z"},
    "tree": {"guided_grammar": f"start: {' '.join(['a0'] * 10)}\n{_TREE}"},
    "ambiguous": {"guided_grammar": 'start: e\ne: e e e | e e | /[a-z ]{1,9}/ | /[a-c ]{1,9}/ | "a"\n'},
    "repetitions": {"guided_grammar": 'start: a{1,5000}\na: b{1,5000}\nb: "x"\n'},
    "empty_lines": {"grammar": "\n" * 100_000},
    "unclosed_expression": {"guided_grammar": "/" + "\\/" * 100_000},
    "unclosed_token": {"guided_grammar": "<" * 200_000},
    "deep": {"grammar": f"root ::= {_DEEP}"},
    "wide": {"guided_json": _WIDE},
    "names": {"guided_choice": [f"choice {n} {'x' * (n % 50)}" for n in range(4000)]},
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The fake model in a worker of its own, with steps of 10 ms."""
    folder = tmp_path_factory.mktemp("bombs")
    config = folder / "enginehouse.toml"
    config.write_text(CONFIG.format(source=folder.as_posix()), encoding="utf-8")
    with started_server("--config", config) as process:
        with httpx.Client(base_url=process.url, timeout=60) as client:
            wait_ready(client)
        yield process


@pytest.fixture(scope="module")
def client(process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=60) as client:
        yield client


def chat(**fields) -> dict:
    return {"messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 4, **fields}


class Stream(threading.Thread):
    """Reads a stream until told to stop, and notes how long it stood still."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.gap_s, self.num_events = url, 0.0, 0
        self.begun, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        body = chat(stream=True, ignore_eos=True, max_tokens=4000, temperature=1)
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=60) as response:
            last = time.monotonic()
            for _ in response.iter_raw():
                now = time.monotonic()
                if self.num_events > 3:
                    self.gap_s = max(self.gap_s, now - last)
                    self.begun.set()
                last = now
                self.num_events += 1
                if self.ended.is_set():
                    return


@pytest.mark.parametrize("name", BOMBS)
def test_a_running_stream_goes_on(process: ServerProcess, client: httpx.Client, name: str) -> None:
    stream = Stream(process.url)
    stream.start()
    assert stream.begun.wait(30)
    try:
        began = time.monotonic()
        bomb = client.post("/v1/chat/completions", json=chat(**BOMBS[name], max_tokens=30))
        assert time.monotonic() - began < 30
        assert bomb.status_code in (200, 400, 500), bomb.text
        if bomb.status_code == 500:  # it could be begun, but not be followed to its end
            assert bomb.json()["error"]["code"] == "generation_failed"
        before = stream.num_events
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        wait_until(lambda: stream.num_events > before, "the stream goes on")
    finally:
        stream.ended.set()
        stream.join(30)
    assert stream.gap_s < MAX_GAP_S


def test_bombs_at_once_leave_the_worker_alive(process: ServerProcess, client: httpx.Client) -> None:
    """All of them from several clients: the same workers, bounded memory, and everything else is served."""
    server = psutil.Process(process.process.pid)
    workers = {child.pid for child in server.children(recursive=True)}
    answers: list[int] = []

    def throw(seed: int) -> None:
        with httpx.Client(base_url=process.url, timeout=110) as own:
            for bomb in BOMBS.values():
                answers.append(own.post("/v1/chat/completions", json=chat(**bomb, seed=seed)).status_code)

    threads = [threading.Thread(target=throw, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    plain = 0
    while any(thread.is_alive() for thread in threads):
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        plain += 1
    for thread in threads:
        thread.join()

    assert set(answers) <= {200, 400, 500} and len(answers) == 3 * len(BOMBS)
    assert plain > 0
    assert {child.pid for child in server.children(recursive=True)} == workers
    assert max(child.memory_info().rss for child in server.children(recursive=True)) < MAX_BYTES


def test_what_is_too_large_is_not_even_started(client: httpx.Client, tmp_path: Path) -> None:
    response = client.post("/v1/chat/completions", json=chat(guided_choice=["x" * 300_000]))

    assert response.status_code == 400 and response.json()["error"]["param"] == "guided_choice"
    assert "262144" in json.dumps(response.json())
