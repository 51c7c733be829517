"""The fake model's draft head keeps the contract of heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import ModelLoadError
from enginehouse_testkit.fake_heads import FAKE_HEAD
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner
from enginehouse_testkit.head_contract import HeadContract


class TestFakeHead(HeadContract):
    @pytest.fixture(params=["share", "copy"])
    def open_headed(self, request: pytest.FixtureRequest) -> Callable[[], Runner]:
        return lambda: FakeRunner(FakeOptions(draft_head=True, context=64, slots=4, fork=request.param))


@pytest.mark.parametrize("options", [FakeOptions(), FakeOptions(draft_head=True, window=8)])
def test_a_model_without_a_head_has_none(options: FakeOptions) -> None:
    with pytest.raises(ModelLoadError, match="set draft_head"):
        FakeRunner(options).open_head(None, max_tokens=1, min_probability=0.0)


def test_files_of_a_head_are_read(tmp_path: Path) -> None:
    source = ModelSource("head", tmp_path / "head")
    runner = FakeRunner(FakeOptions(draft_head=True))
    (tmp_path / "head").write_text("a poem")

    with pytest.raises(ModelLoadError, match="not a head of the fake model"):
        runner.open_head(source, max_tokens=1, min_probability=0.0)
    (tmp_path / "head").write_text(FAKE_HEAD)
    assert runner.open_head(source, max_tokens=1, min_probability=0.0).max_tokens == 1
