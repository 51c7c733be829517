"""kill -9 of a worker, in every phase: a pause, and then the answer that there would have been."""

from __future__ import annotations

import os
import sys
import time

import httpx
import pytest

from enginehouse_testkit.waiting import wait_until

from .rig import Answer, Rig, fake, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

LONG = "once upon a time there was a very long prompt " * 80


def undisturbed(server: Rig, prompt: str = "tell me", **fields) -> Answer:
    answer = server.ask(prompt, **fields).wait()
    assert answer.error is None
    assert answer.is_complete
    return answer


def check_same(answer: Answer, expected: Answer) -> None:
    answer.wait()
    assert answer.error is None, answer.error
    assert answer.is_complete
    assert answer.choices == expected.choices
    assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"]
    assert answer.usage["prompt_tokens"] == expected.usage["prompt_tokens"]


@pytest.fixture
def server():
    """A new one for every test: the more often a worker dies, the longer the pause before the next one."""
    with rig({"m": fake(prefix_cache=False)}) as running:
        yield running


@pytest.fixture
def server_of_two():
    """With a model that is not killed."""
    with rig({"other": fake(), "m": fake(prefix_cache=False)}) as running:
        yield running


@pytest.fixture(scope="module")
def expected():
    with rig({"m": fake()}) as server:
        return undisturbed(server)


@pytest.fixture(scope="module")
def expected_beside():
    with rig({"m": fake()}) as server:
        return undisturbed(server, max_tokens=200)


@pytest.fixture
def beside(server_of_two, expected_beside):
    """A stream of another model that begins before the test and is checked after it."""
    answer = server_of_two.ask(model="other", max_tokens=200)
    answer.wait_chunks(1)
    yield
    check_same(answer, expected_beside)


@pytest.mark.usefixtures("beside")
def test_kill_while_it_decodes(server_of_two, expected, turn):
    streamed, whole = server_of_two.ask(), server_of_two.ask(stream=False)
    streamed.wait_chunks(3 + turn)
    server_of_two.kill()

    check_same(streamed, expected)
    check_same(whole, expected)
    check_same(server_of_two.ask(), expected)


def test_kill_while_it_prefills(expected_beside, turn):
    """Each chunk of the prompt takes a while; the answer is accepted, and no token of it is there."""
    with_long = {"prompt": LONG + str(turn), "max_tokens": 4}
    with rig({"other": fake(), "m": fake(prefix_cache=False, step_delay_s=0.1)}) as server:
        expected = undisturbed(server, **with_long)
        beside = server.ask(model="other", max_tokens=200)
        beside.wait_chunks(1)
        answer = server.kill_in_prefill(lambda attempt: server.ask(**with_long))

        check_same(answer, expected)
        check_same(beside, expected_beside)


@pytest.mark.usefixtures("beside")
def test_kill_while_requests_queue(server_of_two, expected, turn):
    running = [server_of_two.ask("keep the slots busy", max_tokens=60) for _ in range(4)]
    for answer in running:
        answer.wait_chunks(1)
    queued = [server_of_two.ask() for _ in range(3)]
    for answer in queued:
        answer.wait_status()
    server_of_two.kill()

    for answer in queued:
        check_same(answer, expected)
    texts = {answer.wait().text for answer in running}
    assert len(texts) == 1
    assert len(running[0].text) > 0
    assert all(answer.is_complete for answer in running)


@pytest.mark.usefixtures("beside")
def test_kill_while_it_is_idle(server_of_two, expected, turn):
    server_of_two.kill()

    wait_until(lambda: len(server_of_two.workers()) == 1, "the next worker")
    server_of_two.wait_ready()
    check_same(server_of_two.ask(), expected)


def test_kill_while_it_loads(expected, turn):
    """The model is loaded once more, and requests wait for that."""
    with rig({"m": fake(open_delay_s=0.6)}, ready=False) as server:
        wait_until(server.workers, "a worker")
        first = server.kill()
        wait_until(server.workers, "the next worker")

        check_same(server.ask(), expected)
        assert [worker.pid for worker in server.workers()] != [first]


CASES = {
    "n": {"n": 3, "temperature": 1.0, "seed": 5},
    "stop": {"stop": ["zebra", "e t", "qx"], "temperature": 1.0, "seed": 6, "max_tokens": 80},
    "logprobs": {"logprobs": 2, "temperature": 1.0, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.9, "seed": 8},
    "mirostat": {"mirostat": 2, "temperature": 1.5, "seed": 9},
    "end tokens": {"n": 4, "temperature": 1.3, "seed": 10, "ignore_eos": False, "max_tokens": 120},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES.keys())
def test_kill_in_the_middle_of(server, fields, turn):
    expected = undisturbed(server, **fields)
    answer = server.ask(**fields)
    answer.wait_chunks(4 + turn)
    server.kill()

    check_same(answer, expected)


def test_stop_regex_token_ids_and_cached_tokens_are_those_of_an_undisturbed_answer() -> None:
    """The prefix cache of the next worker is empty; what counts is that of the first."""
    fields = {
        "stop_regex": r"\s+[a-z]+x.",
        "repeat_last_n": 6,
        "repetition_penalty": 1.5,
        "temperature": 0.9,
        "seed": 11,
        "return_token_ids": True,
        "max_tokens": 60,
    }
    with rig({"m": fake()}) as server:
        undisturbed(server, **fields)
        expected = undisturbed(server, **fields)
        assert len(expected.chunks) > 12, "there is time for a kill"
        answer = server.ask(**fields)
        answer.wait_chunks(5)
        server.kill()
        check_same(answer, expected)

    told, expected_ids = (
        [token_id for chunk in one.chunks for choice in chunk["choices"] for token_id in choice.get("token_ids") or ()]
        for one in (answer, expected)
    )
    assert told == expected_ids
    assert len(told) == answer.usage["completion_tokens"]
    assert [choice["finish_reason"] for choice in answer.choices] == ["stop"]
    assert answer.text.endswith("toku in")
    assert answer.chunks[0]["choices"][0]["prompt_token_ids"]
    assert answer.usage["prompt_tokens_details"] == expected.usage["prompt_tokens_details"]
    assert expected.usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_kill_again_and_again(server):
    """A stream that goes on after each death is no culprit, however many there are."""
    expected = undisturbed(server, max_tokens=400)
    answer = server.ask(max_tokens=400)
    seen = 1
    for _ in range(3):
        # Far beyond what it must come in its isolation run; the more often it was quarantined, the further.
        answer.wait_chunks(seen)
        server.kill()
        wait_until(lambda: len(server.workers()) == 1, "the next worker")
        seen = len(answer.chunks) + 40

    check_same(answer, expected)


def test_pause_keeps_the_connection_alive(expected):
    with rig({"m": fake(open_delay_s=1.0)}, ping_s=0.1) as server:
        answer = server.ask()
        answer.wait_chunks(4)
        server.kill()
        check_same(answer, expected)

        assert answer.lines.count(": ping") >= 3


def test_client_that_leaves_in_the_pause_leaves_nothing_behind():
    with rig({"m": fake(open_delay_s=1.5, slots=1)}) as server:
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": "m", "prompt": "x", "stream": True, "ignore_eos": True, "temperature": 0},
            timeout=30,
        ) as response:
            lines = response.iter_lines()
            assert any(line.startswith("data: {") for line in lines)
            server.kill()
        server.wait_ready()
        began = time.monotonic()
        assert undisturbed(server, max_tokens=3).text

        assert time.monotonic() - began < 10, "the only slot was taken"


def test_model_without_replay_ends_its_streams():
    with rig({"m": fake(replay=False)}) as server:
        answer = server.ask(max_tokens=200)
        answer.wait_chunks(3)
        server.kill()
        answer.wait()

        assert not answer.is_complete
        assert answer.error is not None
        assert answer.error["code"] == "engine_dead"
        assert undisturbed(server).text


@pytest.fixture
def python_that_starts_once(tmp_path):
    """An interpreter that hangs from its second start on."""
    python = tmp_path / "python"
    script = f'[ -e {tmp_path}/used ] && exec sleep 60\ntouch {tmp_path}/used\nexec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def test_stream_ends_with_an_error_when_its_worker_does_not_come_back(python_that_starts_once):
    with rig({"m": fake(python=python_that_starts_once, replay_timeout_s=1.0)}) as server:
        streamed, whole = server.ask(), server.ask(stream=False)
        streamed.wait_chunks(3)
        server.kill()
        streamed.wait()
        whole.wait()

        assert not streamed.is_complete
        assert whole.status == 503
        for answer in (streamed, whole):
            assert answer.error is not None
            assert answer.error["code"] == "engine_dead"
            assert "was not back within 1 s" in answer.error["message"]


def test_questions_are_asked_again(server, turn):
    """Tokens of a text and texts of tokens, while there is no worker that could tell."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        text = {"model": "m", "prompt": "tell me a story"}
        expected = client.post("/tokenize", json=text).json()
        server.kill()
        found = client.post("/tokenize", json=text).json()
        again = client.post("/detokenize", json={"model": "m", "tokens": found["tokens"]}).json()

    assert found == expected
    assert again["content"] == "<|bos|>tell me a story"


def test_echo_outlives_a_worker(server, turn):
    fields = {"echo": True, "logprobs": 1, "max_tokens": 30 + 3 * turn}
    expected = undisturbed(server, **fields)
    answer = server.ask(**fields)
    answer.wait_chunks(3 + turn)
    server.kill()

    check_same(answer, expected)
