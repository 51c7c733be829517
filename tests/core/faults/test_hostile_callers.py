"""Texts that kill the worker, from one caller, beside the streams of another: the one pays, the others never end."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .rig import Answer, Rig, fake, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

_log = logging.getLogger(__name__)

KEYS = OWNER, HOSTILE = ("the-key-of-the-streams", "the-key-of-somebody-hostile")
KILLS = "~"
FAULTS = {"abort_at_text": KILLS}
TEXT = "a" * 4000 + KILLS
NUM_TOKENS = 300


def streams(server: Rig, *, num_tokens: int = NUM_TOKENS) -> list[Answer]:
    """Three, which run."""
    running = [server.ask(f"guest {n}", key=OWNER, max_tokens=num_tokens) for n in range(3)]
    for stream in running:
        stream.wait_chunks(3)
    return running


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with rig({"m": fake()}, keys=KEYS) as server:
        return [stream.wait().text for stream in streams(server)]


def num_deaths(server: Rig) -> int:
    with server.client(OWNER) as client:
        return int(client.get("/v1/models/m").json()["num_restarts"])


def note_gap(running: list[Answer], num_workers: int) -> None:
    """How long the streams stood still; a worker takes about a second to start, far longer on a busy machine."""
    longest_s = max(stream.longest_gap_s for stream in running)
    _log.info("longest gap of the streams %.2f s, %d workers died", longest_s, num_workers)
    assert longest_s < 60


def tokenize(client: httpx.Client, text: str) -> httpx.Response:
    return client.post("/tokenize", json={"model": "m", "content": text})


def chat(client: httpx.Client, text: str, **fields: object) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return client.post("/v1/chat/completions", json=body)


def code(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json().get("error", {}).get("code")


REFUSED = (422, "request_kills_worker")


@pytest.mark.parametrize("first", ["tokenize", "chat"])
def test_streams_of_another_key_go_on_beside_ten_hostile_requests(expected, first):
    """The same text by two addresses, with another ``max_tokens`` each time: it costs two workers, not twenty."""
    with rig({"m": fake(faults=FAULTS)}, keys=KEYS) as server, server.client(HOSTILE) as client:
        running = streams(server)
        with ThreadPoolExecutor(10) as pool:
            tokenized = lambda n: tokenize(client, TEXT)  # noqa: E731
            answered = lambda n: chat(client, TEXT, max_tokens=n + 1, temperature=n / 10, seed=n)  # noqa: E731
            pair = (tokenized, answered) if first == "tokenize" else (answered, tokenized)
            hostile = [pool.submit(pair[n % 2], n) for n in range(10)]
            codes = [code(sent.result()) for sent in hostile]

        assert codes == [REFUSED] * 10
        assert [stream.wait().text for stream in running] == expected
        assert all(stream.is_complete for stream in running)
        note_gap(running, num_deaths(server))
        assert num_deaths(server) == 2
        assert code(tokenize(client, TEXT)) == REFUSED
        assert code(chat(client, TEXT, max_tokens=99)) == REFUSED
        assert num_deaths(server) == 2
        assert tokenize(client, "something else").status_code == 200


def test_every_other_text_that_kills_costs_two_workers_more_and_its_caller_a_pause(expected):
    """How long the pauses are, and that others do not wait, is shown in simulated time with ``ModelWork``."""
    with rig({"m": fake(faults=FAULTS)}, keys=KEYS) as server, server.client(HOSTILE) as client:
        running = streams(server, num_tokens=600)
        for number in range(2):
            began = time.monotonic()
            assert code(tokenize(client, f"{number} {TEXT}")) == REFUSED
            with server.client(OWNER) as owner:
                assert tokenize(owner, "hello").status_code == 200
        assert num_deaths(server) == 4
        assert tokenize(client, "hello").status_code == 200
        assert time.monotonic() - began > 2, "the second pause"
        assert [stream.wait().text[: len(text)] for stream, text in zip(running, expected, strict=True)] == expected
        note_gap(running, num_deaths(server))


def test_hostile_client_that_leaves_at_once_is_not_worth_a_stream(expected):
    """It is gone before it could be found out; what ran beside it is not convicted in its place."""
    with rig({"m": fake(faults=FAULTS)}, keys=KEYS) as server, server.client(HOSTILE) as client:
        running = streams(server)
        for _ in range(3):
            with contextlib.suppress(httpx.TimeoutException):  # unless it was found out before
                assert code(client.post("/tokenize", json={"model": "m", "content": TEXT}, timeout=0.05)) == REFUSED
            time.sleep(0.2)

        assert [stream.wait().text for stream in running] == expected
        assert all(stream.is_complete for stream in running)


def test_short_harmless_text_of_a_killing_prompt_is_refused_to_no_other():
    with rig({"m": fake(faults=FAULTS)}, keys=KEYS) as server, server.client(HOSTILE) as client:
        body = {"model": "m", "messages": [{"role": "system", "content": "hi"}, {"role": "user", "content": TEXT}]}
        assert code(client.post("/v1/chat/completions", json=body)) == REFUSED
        with server.client(OWNER) as owner:
            assert tokenize(owner, "hi").status_code == 200
            assert chat(owner, "hi", max_tokens=2).status_code == 200
        assert tokenize(client, "hi").status_code == 200
