"""Longest times of a request: in the queue, to its first token, and in all; before the first byte and behind it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

from .harness import begin

PROMPT = {"prompt": "hi"}  # no template, whose process would have to start within these short times
LONG_S = 600.0


@contextmanager
def connect(tmp_path: Path, tokens: list, model: dict | None = None, **limits) -> Iterator[httpx.Client]:
    source = write_script(tmp_path / "script.json", tokens)
    settings = Settings(
        models={"m": ModelSettings(source=source, backend="scripted", slots=1, **(model or {}))},
        limits=LimitsSettings(**limits),
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=120) as client:
        yield client


def events(response: httpx.Response) -> list[dict]:
    blocks = response.text.split("\n\n")
    return [json.loads(block[6:]) for block in blocks if block.startswith("data: {")]


def text_of(chunks: list[dict]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))


def test_an_answer_that_does_not_begin_ends_with_an_error(tmp_path: Path) -> None:
    with connect(tmp_path, [{"delay_s": LONG_S}, "late"], first_token_timeout_s=1.0) as client:
        whole = client.post("/v1/completions", json=PROMPT)
        streamed = client.post("/v1/completions", json=PROMPT | {"stream": True})

    assert whole.status_code == 504
    assert (whole.json()["error"]["code"], whole.json()["error"]["type"]) == ("first_token_timeout", "timeout_error")
    assert events(streamed)[-1]["error"]["code"] == "first_token_timeout"
    assert "[DONE]" not in streamed.text


def test_an_answer_that_has_started_may_take_its_time(tmp_path: Path) -> None:
    with connect(tmp_path, ["a", {"delay_s": 1.5}, "b"], first_token_timeout_s=1.0) as client:
        whole = client.post("/v1/completions", json=PROMPT)
        streamed = client.post("/v1/completions", json=PROMPT | {"stream": True})

    assert whole.json()["choices"][0]["text"] == "ab"
    assert text_of(events(streamed)) == "ab" and "[DONE]" in streamed.text


def test_an_answer_that_does_not_end_keeps_what_was_said(tmp_path: Path) -> None:
    with connect(tmp_path, ["so ", "far", {"delay_s": LONG_S}, "late"], total_timeout_s=1.5) as client:
        streamed = client.post("/v1/completions", json=PROMPT | {"stream": True})
        whole = client.post("/v1/completions", json=PROMPT)

    *chunks, last = events(streamed)
    assert text_of(chunks) == "so far"
    assert last["error"]["code"] == "total_timeout"
    assert "[DONE]" not in streamed.text
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "total_timeout"


def test_the_slot_of_a_request_whose_time_is_up_is_free(tmp_path: Path) -> None:
    """There is one slot, and the script would hold it for a minute."""
    began = time.monotonic()
    with connect(tmp_path, [{"delay_s": LONG_S}], first_token_timeout_s=1.0) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=PROMPT).status_code == 504

    assert time.monotonic() - began < 60


def test_a_models_own_times_come_first(tmp_path: Path) -> None:
    own = {"total_timeout_s": 30.0, "first_token_timeout_s": 0.5}
    with connect(tmp_path, [{"delay_s": LONG_S}], own, total_timeout_s=0.1, first_token_timeout_s=30.0) as client:
        assert client.post("/v1/completions", json=PROMPT).json()["error"]["code"] == "first_token_timeout"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_request_that_waits_too_long_leaves_the_queue(tmp_path: Path, isolation: str) -> None:
    """In a real engine on the fake runner, whose only slot is taken."""
    model = ModelSettings(
        source=str(tmp_path), backend="fake", isolation=isolation, slots=1, context=4096, options={"step_delay_s": 0.02}
    )
    settings = Settings(
        models={"m": model}, limits=LimitsSettings(queue_timeout_s=1.0), plugins=PluginsSettings(allow=())
    )
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with served(settings, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=long) as holding:
            begin(holding)
            whole = client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})
            streamed = client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1, "stream": True})
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "queue_timeout"
        assert int(whole.headers["retry-after"]) >= 1
        assert events(streamed)[-1]["error"]["code"] == "queue_timeout"
        # The slot becomes free when the server notices that the client has left.
        wait_until(lambda: client.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}).status_code == 200)
