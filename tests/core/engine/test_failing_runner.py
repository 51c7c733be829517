"""A runner whose methods fail: the plugin is named, and at most the request that it was called for fails."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import field, frozen

from enginehouse.contract.drafter import Draft, DraftTask
from enginehouse.contract.errors import PluginFailed, RunnerError
from enginehouse.contract.types import EngineSettings
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import Result, WatchedClose, alone, make_request, prompt_of, run

LONG = prompt_of(1, 60)


@frozen
class Broken:
    """A method that fails.

    Attributes:
        method: its name; of what ``sample`` returns after a dot.
        deed: what it does: an exception to raise, or a value to return.
        fails: True if the request for which it is called fails.
        options: of the runner.
        drafts: a drafter proposes tokens.
    """

    method: str
    deed: Any
    fails: bool
    options: FakeOptions = field(factory=FakeOptions)
    drafts: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.deed!r}"


ON_DEVICE = FakeOptions(device_sampling=True)
BOUNDED = FakeOptions(window=64, window_slack=64)

METHODS = [
    Broken(method, deed, fails, *more)
    for method, wrong, fails, *more in [
        ("open_sequence", "a handle", True),
        ("fork", 7, False),
        ("truncate", None, True, FakeOptions(), True),
        ("free_sequence", None, False),
        ("free_tokens", "many", True),
        ("kept_length", 1.5, False, BOUNDED),
        ("sample", [1], False, ON_DEVICE),
        ("sample.host", ["a"], True, ON_DEVICE),
    ]
    for deed in (RuntimeError("a secret"), SystemExit(3), wrong)
    if method != "free_sequence" or deed is not wrong  # its result is not used
]


class Wrong:
    """Proposes tokens that are hardly ever right, so that the runner must take them back."""

    is_free, prior = True, 0.9

    def open(self, prompt: np.ndarray, prediction: Sequence[int]) -> object:
        return self

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [Draft([65] * min(4, task.max_tokens)) for task in tasks]

    def close(self, session: object) -> None: ...

    def shutdown(self) -> None: ...


def engine_of(broken: Broken, runner: FakeRunner) -> StepEngine:
    settings = EngineSettings(slots=4, prefix_cache=broken.method != "free_sequence")
    return StepEngine(runner, settings, {}, drafters={"wrong": Wrong()} if broken.drafts else {})


def break_method(runner: FakeRunner, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the method fail each time."""

    def fail(*_: Any) -> Any:
        if isinstance(broken.deed, BaseException):
            raise broken.deed
        return broken.deed

    name, _, inner = broken.method.partition(".")
    if not inner:
        monkeypatch.setattr(runner, name, fail)
        return
    found = getattr(runner, name)

    def with_broken(*arguments: Any) -> Any:
        result = found(*arguments)
        setattr(result, inner, fail)
        return result

    monkeypatch.setattr(runner, name, with_broken)


def ask(engine: StepEngine, prompt: Sequence[int]) -> Result:
    return run(engine, [(make_request(max_tokens=12, ignore_eos=True), list(prompt))])[0]


@pytest.mark.parametrize(("method", "fork"), [("fork", "share"), ("truncate", "none")])
def test_a_prefix_that_the_runner_cannot_open_is_computed_again(
    method: str, fork: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it says so by an error of the contract."""
    broken = Broken(method, RunnerError("its state cannot be restored"), False, FakeOptions(fork=fork))
    runner = WatchedClose(broken.options)
    engine = engine_of(broken, runner)
    ask(engine, LONG)
    with monkeypatch.context() as patch:
        break_method(runner, broken, patch)
        result = ask(engine, LONG[:40])

    assert result.text == alone(make_request(max_tokens=12, ignore_eos=True), LONG[:40], broken.options).text
    engine.close()
    assert runner.num_left == 0, "a sequence that is only half opened is freed"


@pytest.mark.parametrize("broken", METHODS, ids=str)
def test_runner_method_that_fails(
    broken: Broken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner(broken.options)
    engine = engine_of(broken, runner)
    if not broken.drafts:  # the drafter would lose its credit
        ask(engine, LONG)  # the prefix cache holds it
    with monkeypatch.context() as patch:
        break_method(runner, broken, patch)
        result = ask(engine, LONG[:40])

    if broken.fails:
        assert isinstance(result.error, PluginFailed)
        assert result.error.message.startswith("The backend 'FakeRunner' of the plugin")
        assert "secret" not in result.error.message
    else:
        expected = alone(make_request(max_tokens=12, ignore_eos=True), LONG[:40], broken.options)
        assert (result.error, result.text) == (None, expected.text)
    place = broken.method.partition(".")[2] or broken.method
    assert re.search(rf"the backend 'FakeRunner' of the plugin '\S+'(: {place} gave| failed in {place})", caplog.text)
    after = ask(engine, LONG)
    assert after.error is None and after.text, "the engine goes on"


def test_tokens_of_a_sequence_that_cannot_be_cut_after_a_failed_pass_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner()
    engine = StepEngine(runner, EngineSettings(slots=4), {})
    work = [(make_request(max_tokens=9, ignore_eos=True), prompt_of(i, 5)) for i in range(2)]
    forward, length, num_passes = runner.forward, runner.length, itertools.count()
    is_unknown: list[bool] = []

    def fail_once(spans: Any) -> Any:
        if next(num_passes) == 3:
            is_unknown.append(True)
            raise RuntimeError("the pass fails")
        return forward(spans)

    def unknown_once(sequence: int) -> int:
        if is_unknown:
            is_unknown.clear()
            raise RuntimeError("its length is not known")
        return length(sequence)

    monkeypatch.setattr(runner, "forward", fail_once)
    monkeypatch.setattr(runner, "length", unknown_once)
    results = run(engine, work)

    assert [result.text for result in results] == [alone(*one).text for one in work]
    assert "failed in length" in caplog.text
