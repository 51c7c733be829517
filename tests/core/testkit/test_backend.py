"""The suites of backends, runners and engines pass on the fake backend in all its variants."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_testkit.backend_contract import BackendContract
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions
from enginehouse_testkit.runner_contract import RunnerContract

SMALL = {"context": 128, "cache_tokens": 320, "max_batch_tokens": 100, "max_sequences": 8, "slots": 4}


class FakeModel:
    variant: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelUnderTest:
        return ModelUnderTest(
            backend=FakeBackend(), source=ModelSource("fake"), options=FakeOptions(**SMALL, **cls.variant)
        )


class TestShare(FakeModel, BackendContract, RunnerContract, EngineContract):
    exact = True


class TestCopy(FakeModel, RunnerContract):
    variant = {"fork": "copy"}


class TestNoForkAndSeparatePhases(FakeModel, RunnerContract, EngineContract):
    variant = {"fork": "none", "mixed_batch": False}
    exact = True


class TestSlidingWindow(FakeModel, RunnerContract, EngineContract):
    variant = {"window": 6, "window_slack": 2}
    exact = True


class TestCheckpoints(FakeModel, RunnerContract, EngineContract):
    variant = {"num_checkpoints": 12}
    exact = True


class TestCopiedCheckpoints(FakeModel, RunnerContract):
    variant = {"num_checkpoints": 12, "fork": "copy"}
    exact = True


class TestDeviceSampling(FakeModel, EngineContract):
    variant = {"device_sampling": True}
    exact = True


class TestSlow(FakeModel, RunnerContract):
    variant = {"vocab_size": 1000, "step_delay_s": 0.02}
    num_random_steps = 0
