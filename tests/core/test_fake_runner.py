"""The fake runner keeps the runner contract in all its variants, and fails when told to."""

import pytest

from enginehouse.testing.fake_runner import FakeOptions, FakeRunner
from enginehouse.testing.runner_contract import RunnerContract

SMALL = {"context": 128, "cache_tokens": 320, "max_batch_tokens": 100, "max_sequences": 8}


class TestShare(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls):
        return lambda: FakeRunner(FakeOptions(**SMALL))


class TestCopy(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls):
        return lambda: FakeRunner(FakeOptions(**SMALL, fork="copy"))


class TestNoForkAndSeparatePhases(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls):
        return lambda: FakeRunner(FakeOptions(**SMALL, fork="none", mixed_batch=False))


class TestSlidingWindow(RunnerContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls):
        return lambda: FakeRunner(FakeOptions(**SMALL, window=6, window_slack=2))


class TestSlow(RunnerContract):
    num_random_steps = 0

    @pytest.fixture(scope="class")
    @classmethod
    def make_runner(cls):
        return lambda: FakeRunner(FakeOptions(**SMALL, vocab_size=1000, step_delay_s=0.02))
