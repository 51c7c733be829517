"""The disk tier under the engine: what is saved when, what comes back, and that answers never change."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.errors import RunnerError
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.disk import DiskTier, StateFolder
from enginehouse.engine.disk.state_folder import digest
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

_ids = itertools.count()
PROMPT = tuple((7 * number) % 250 for number in range(300))

Answer = tuple[tuple[int, ...], RequestFinished]


class Clock:
    """Time that stands still unless told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Client:
    """Asks an engine."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine

    def submit(self, prompt: tuple[int, ...], **fields: Any) -> str:
        stopping = StopParams(max_tokens=fields.pop("max_tokens", 8), ignore_eos=True)
        sampling = SamplingParams(temperature=0)
        request = EngineRequest(
            request_id=f"r{next(_ids)}", token_ids=prompt, stopping=stopping, sampling=sampling, **fields
        )
        self.engine.add(request, list(prompt))
        return request.request_id

    def drive(self) -> dict[str, Answer]:
        tokens: dict[str, list[int]] = {}
        found: dict[str, Answer] = {}
        for _ in range(5000):
            if not self.engine.has_work():
                return found
            for request_id, event in self.engine.step():
                assert not isinstance(event, Exception), event
                if isinstance(event, TextDelta):
                    tokens.setdefault(request_id, []).extend(event.token_ids)
                if isinstance(event, RequestFinished):
                    found[request_id] = tuple(tokens[request_id]), event
        raise AssertionError("the engine does not come to an end")

    def ask(self, prompt: tuple[int, ...], **fields: Any) -> Answer:
        request_id = self.submit(prompt, **fields)
        return self.drive()[request_id]


class Server(Client):
    """An engine with a disk tier that can be started anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.options = FakeOptions()
        self.max_bytes = 10**8

    def start(self, **changes: Any) -> Server:
        self.options = FakeOptions(**changes)
        self.runner = FakeRunner(self.options)
        can_cut = self.runner.capabilities.truncate == "any"
        model = digest(self.runner.state_format.encode())
        self.states = StateFolder(self.folder, model, self.max_bytes, can_cut=can_cut)
        self.disk = DiskTier(self.runner, self.states, clock=self.clock)
        self.engine = StepEngine(self.runner, EngineSettings(), {}, disk=self.disk)
        return self

    def restart(self, **changes: Any) -> Server:
        self.engine.close()
        return self.start(**changes)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "states").start()
    yield server
    server.engine.close()


def plain(prompt: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """The answer without any cache."""
    engine = StepEngine(FakeRunner(FakeOptions(**options)), EngineSettings(prefix_cache=False), {})
    answer = Client(engine).ask(prompt)[0]
    engine.close()
    return answer


def test_a_prompt_is_found_after_a_restart(server: Server) -> None:
    server.ask(PROMPT)
    server.restart()
    tokens, summary = server.ask((*PROMPT, 5, 6))

    assert summary.usage.loaded_prompt_tokens == summary.usage.cached_tokens == len(PROMPT)
    assert tokens == plain((*PROMPT, 5, 6))
    assert server.ask((*PROMPT, 9))[1].usage.loaded_prompt_tokens == 0, "by now it is in memory"


def test_a_part_of_a_saved_sequence_is_enough(server: Server) -> None:
    server.ask(PROMPT)
    server.restart()
    other = (*PROMPT[:120], *range(40))
    tokens, summary = server.ask(other)

    assert summary.usage.loaded_prompt_tokens == 120
    assert tokens == plain(other)


@pytest.mark.parametrize("fork", ["share", "copy", "none"])
def test_every_kind_of_runner(server: Server, fork: str) -> None:
    server.restart(fork=fork)
    server.ask(PROMPT)
    server.restart(fork=fork)
    prompts = [(*PROMPT, 1), (*PROMPT, 2), (*PROMPT[:100], 3)]
    asked = [server.submit(prompt) for prompt in prompts]
    found = server.drive()

    assert [found[one][0] for one in asked] == [plain(prompt) for prompt in prompts]
    assert found[asked[0]][1].usage.loaded_prompt_tokens == len(PROMPT)


def test_sliding_windows_reuse_whole_sequences_only(server: Server) -> None:
    window = {"window": 16, "window_slack": 2}
    server.restart(**window)
    answer = server.ask(PROMPT)[0]
    server.restart(**window)
    turn = (*PROMPT, *answer[:-1], 7, 8, 9)  # the last token of an answer is drawn, but not computed
    part = (*PROMPT[:200], 7)
    tokens, summary = server.ask(turn)
    other, nothing = server.ask(part)

    assert summary.usage.loaded_prompt_tokens == len(PROMPT) + len(answer) - 1
    assert tokens == plain(turn, **window)
    assert nothing.usage.cached_tokens == 0
    assert other == plain(part, **window)


@pytest.mark.parametrize("fork", ["share", "copy"])
def test_a_sequence_with_a_state_goes_back_to_a_saved_checkpoint(server: Server, fork: str) -> None:
    """After a restart as before it; a longer sequence with a checkpoint there replaces the file of a shorter one."""
    recurrent = {"num_checkpoints": 8, "fork": fork}
    server.restart(**recurrent)
    server.ask(PROMPT)
    server.restart(**recurrent)
    other = (*PROMPT[:-1], 7, 8, 9)
    tokens, summary = server.ask(other)

    assert summary.usage.loaded_prompt_tokens == summary.usage.cached_tokens == len(PROMPT) - 1
    assert tokens == plain(other, num_checkpoints=8)
    assert server.ask((*PROMPT[:150], 7))[1].usage.cached_tokens == 0, "there is no checkpoint before it"
    turn = (*other, *tokens[:-1], 5, 6)
    server.ask(turn)
    server.restart(**recurrent)
    assert server.ask((*other, *tokens[:-1], 1))[1].usage.loaded_prompt_tokens == len(other) + len(tokens) - 1


def test_what_is_loaded_replaces_a_sequence_whose_checkpoints_were_dropped(server: Server) -> None:
    """It is loaded once: later requests find it in memory."""
    server.restart(num_checkpoints=4)
    server.ask(PROMPT)
    server.disk.flush_when_idle()
    server.disk.flush()
    for first in range(4):
        server.ask((first + 1, *PROMPT[:60]))
    usages = [server.ask(PROMPT)[1].usage for _ in range(3)]

    assert [usage.cached_tokens for usage in usages] == 3 * [len(PROMPT) - 1]
    assert [usage.loaded_prompt_tokens for usage in usages] == [len(PROMPT) - 1, 0, 0]


def test_namespaces_do_not_share_the_disk(server: Server) -> None:
    server.ask(PROMPT, namespace="alice")
    server.restart()

    assert server.ask(PROMPT, namespace="bob")[1].usage.cached_tokens == 0
    assert server.ask(PROMPT, namespace="alice")[1].usage.loaded_prompt_tokens == len(PROMPT) - 1


def test_requests_that_may_not_be_cached_are_not_saved_and_load_nothing(server: Server) -> None:
    server.ask(PROMPT, cache_prompt=False)
    server.restart()
    assert len(server.states) == 0
    server.ask(PROMPT)
    server.restart()

    assert server.ask(PROMPT, cache_prompt=False)[1].usage.cached_tokens == 0


def test_short_sequences_are_not_saved(server: Server) -> None:
    server.ask(PROMPT[:40])
    server.restart()

    assert len(server.states) == 0


def test_what_is_evicted_is_saved(server: Server) -> None:
    server.restart(context=400, cache_tokens=700)
    prompts = [tuple((number + 11 * first) % 250 for number in range(300)) for first in range(1, 4)]
    for prompt in prompts:
        server.ask(prompt)
    server.disk.flush()

    assert len(server.states) >= 1
    assert server.ask((*prompts[0], 1))[1].usage.loaded_prompt_tokens == 300


def test_an_engine_at_rest_saves_one_after_the_other(server: Server) -> None:
    """After a second without work; nothing is left to do then."""
    server.ask(PROMPT)
    server.ask(tuple(reversed(PROMPT)))
    assert server.disk.tends_in_s() == 1.0
    server.clock.now += 1.0
    rounds = 0
    while server.disk.tends_in_s() is not None:
        assert server.disk.tends_in_s() == 0.0
        server.disk.flush_when_idle()
        rounds += 1
    server.disk.flush()

    assert rounds == len(server.states) == 2


def test_a_step_saves_for_a_bounded_time(server: Server) -> None:
    """What would take too long is not saved while others wait for it; at rest it is."""
    server.restart(cache_tokens=len(PROMPT) + 50)
    server.disk.pace.saving.observe(1, 1.0)  # a second per token
    server.ask(PROMPT)
    server.ask(tuple(reversed(PROMPT)))
    server.disk.flush()
    assert len(server.engine.view().prefixes) == 1, "the second one needs the memory of the first"
    assert len(server.states) == 0
    server.disk.flush_when_idle()
    server.disk.flush()

    assert len(server.states) == 1


def test_what_is_quicker_computed_is_not_loaded(server: Server) -> None:
    server.ask(PROMPT)
    server.restart()
    server.disk.pace.loading.observe(1, 1.0)
    server.disk.pace.computing.observe(1, 0.001)

    assert server.ask(PROMPT)[1].usage.cached_tokens == 0


def test_a_damaged_file_only_costs_its_use(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.ask(PROMPT)
    server.engine.close()
    (path,) = server.folder.glob("*.state")
    data = bytearray(path.read_bytes())
    data[-200] ^= 255
    path.write_bytes(data)
    server.start()
    tokens, summary = server.ask(PROMPT)

    assert summary.usage.cached_tokens == 0
    assert tokens == plain(PROMPT)
    assert not path.exists()
    assert "ignored and removed" in caplog.text


def test_a_state_that_the_runner_refuses_is_removed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ask(PROMPT)
    server.restart()

    def refuse(data: memoryview) -> int:
        raise RunnerError("no")

    monkeypatch.setattr(server.runner, "load", refuse)
    assert server.ask(PROMPT)[1].usage.cached_tokens == 0
    server.disk.flush()
    assert len(server.states) == 0


def test_a_runner_that_cannot_save_costs_nothing_else(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sequence: int) -> memoryview:
        raise RunnerError("no")

    monkeypatch.setattr(server.runner, "save", fail)
    first, second = server.ask(PROMPT)[0], server.ask(PROMPT)
    server.disk.flush_when_idle()

    assert first == second[0] == plain(PROMPT)
    assert second[1].usage.cached_tokens == len(PROMPT) - 1


def blocked_reads(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets reads wait until the returned function is called."""
    gate, read = threading.Event(), server.states.read

    def wait(state: Any) -> memoryview | None:
        assert gate.wait(30)
        return read(state)

    monkeypatch.setattr(server.states, "read", wait)
    return gate.set


def test_running_streams_do_not_wait_for_the_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ask(PROMPT)
    server.restart()
    release = blocked_reads(server, monkeypatch)
    running = server.submit((1, 2, 3), max_tokens=30)
    server.engine.step()
    waiting = [server.submit((*PROMPT, number)) for number in range(2)]
    outputs = [output for _ in range(20) for output in server.engine.step()]
    assert {request_id for request_id, _ in outputs} == {running}
    release()
    found = server.drive()

    assert [found[one][0] for one in waiting] == [plain((*PROMPT, number)) for number in range(2)]
    assert [found[one][1].usage.cached_tokens for one in waiting] == [len(PROMPT)] * 2
    assert found[running][1].usage.completion_tokens == 30


def test_a_request_that_is_cancelled_while_the_disk_reads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ask(PROMPT)
    server.restart()
    release = blocked_reads(server, monkeypatch)
    running = server.submit((1, 2, 3), max_tokens=30)
    server.engine.step()
    gone = server.submit((*PROMPT, 1))
    server.engine.step()
    server.engine.cancel(gone)
    release()
    found = server.drive()

    assert set(found) == {running}
    assert server.ask((*PROMPT, 2))[0] == plain((*PROMPT, 2))


def test_too_little_room_for_a_state_is_no_error(server: Server) -> None:
    server.ask(PROMPT)
    server.restart(context=350, cache_tokens=360)
    running = server.submit(tuple(range(100)), max_tokens=20)
    server.engine.step()
    prompt = (*PROMPT[:150], 3)
    asked = server.submit(prompt)
    found = server.drive()

    assert found[asked][0] == plain(prompt)
    assert found[running][1].usage.completion_tokens == 20
