"""The adapter contract on the fake runner, which takes adapters in both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.fake_adapters import write_fake_adapter
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions, FakeRunner


class TestFakeAdapters(AdapterContract):
    """Hashes instead of weights: any mistake changes every later row."""

    max_logit_difference = 0.0

    @pytest.fixture(scope="class", params=["per_pass", "mixed"])
    @classmethod
    def model(cls, request: pytest.FixtureRequest) -> ModelUnderTest:
        options = FakeOptions(context=64, mixing=request.param)
        return ModelUnderTest(backend=FakeBackend(), source=ModelSource("fake"), options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        folder = tmp_path_factory.mktemp("adapters")
        adapters = (write_fake_adapter(folder / "one.json", 1), write_fake_adapter(folder / "two.json", 2))
        damaged = (folder / "not-json", folder / "no-number.json")
        damaged[0].write_text("{", encoding="utf-8")
        damaged[1].write_text("{}", encoding="utf-8")

        def open_merged(merged: Mapping[Path, float]) -> Runner:
            return FakeRunner(FakeOptions(context=64, merged={str(path): scale for path, scale in merged.items()}))

        activated = write_fake_adapter(folder / "activated.json", 3, (9, 10))
        return AdaptedModel(adapters, open_merged, damaged, (activated, (9, 10)))
