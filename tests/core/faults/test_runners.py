"""Runners that raise, hang, return NaN or abort: at most the request at fault ends, with an error that says why."""

from __future__ import annotations

import os

import pytest

from .rig import Rig, fake, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

BAD = "a prompt with a ~ in it"
AT = ord("~")


@pytest.fixture(scope="module")
def expected():
    with rig({"m": fake()}) as server:
        return server.ask("fine").wait()


def check_others(server: Rig, expected, running) -> None:
    assert running.wait().choices == expected.choices
    assert running.is_complete
    assert server.ask("fine").wait().choices == expected.choices


@pytest.mark.parametrize("device_sampling", [False, True], ids=["drawn by core", "drawn by the runner"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_is_never_sampled(expected, device_sampling, temperature, turn):
    faults = {"nan_at_token": AT}
    with rig({"m": fake(faults=faults, device_sampling=device_sampling)}) as server:
        running = server.ask("fine")
        running.wait_chunks(2)
        bad = server.ask(BAD, temperature=temperature, stream=bool(turn % 2)).wait()

        assert bad.error is not None
        assert bad.error["code"] == "generation_failed"
        assert not bad.is_complete
        assert not any(chunk.get("choices") for chunk in bad.chunks), "no text of it"
        assert len(server.workers()) == 1
        check_others(server, expected, running)


def test_runner_that_raises_fails_the_request_at_fault(expected, turn):
    with rig({"m": fake(faults={"raise_at_token": AT})}) as server:
        before = [worker.pid for worker in server.workers()]
        running = server.ask("fine")
        running.wait_chunks(2)
        bad = server.ask(BAD, stream=bool(turn % 2)).wait()

        assert bad.error is not None
        assert bad.error["code"] == "plugin_failed"
        assert "fails on purpose" not in bad.error["message"], "what libraries say is for the log"
        check_others(server, expected, running)
        assert [worker.pid for worker in server.workers()] == before, "nobody had to die for it"


@pytest.mark.parametrize("fault", ["hang_at_step", "abort_at_step"])
@pytest.mark.parametrize("step", [1, 12], ids=["in the prompt", "in the answer"])
def test_worker_that_hangs_or_aborts_once_is_a_pause(expected, fault, step, turn, tmp_path):
    faults = {fault: step, "latch": str(tmp_path / "latch")}
    with rig({"m": fake(step_timeout_s=1.0, faults=faults)}, ping_s=0.2) as server:
        before = [worker.pid for worker in server.workers()]
        answer = server.ask("fine", stream=bool(turn % 2)).wait()

        assert answer.choices == expected.choices
        assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"]
        assert [worker.pid for worker in server.workers()] != before
        assert server.ask("fine").wait().choices == expected.choices


def test_slow_steps_are_no_hang(expected):
    """The limit is one of silence, not of a request's length: the steps together take longer here."""
    with rig({"m": fake(step_timeout_s=1.5, step_delay_s=0.15)}) as server:
        answer = server.ask("fine", max_tokens=16).wait()

        assert answer.is_complete
        assert expected.text.startswith(answer.text)


def test_worker_in_a_thread_that_hangs_is_left_behind(expected, tmp_path):
    """It cannot be killed, so its memory is not given back; requests go on in a new thread all the same."""
    faults = {"hang_at_step": 12, "latch": str(tmp_path / "latch")}
    with rig({"m": fake(step_timeout_s=1.0, faults=faults, isolation="thread")}) as server:
        assert server.ask("fine").wait().choices == expected.choices
