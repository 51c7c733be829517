"""The contract suite of poolers passes on the fake one in all its variants, and finds what a broken one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.pooler import Pooler, PoolerInput, TextLayout
from enginehouse_testkit.backend_contract import BackendContract
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.fake_pooler import FakePooler, FakePoolerBackend, FakePoolerOptions
from enginehouse_testkit.pooler_contract import PoolerContract


class FakeModel:
    variant: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelUnderTest:
        return ModelUnderTest(
            backend=FakePoolerBackend(),
            source=ModelSource("fake-pooler"),
            options=FakePoolerOptions(context=128, **cls.variant),
        )


class TestEmbed(FakeModel, BackendContract, PoolerContract):
    variant = {"is_normalized": False, "include_prompt": False, "dimension_choices": (8, 16)}


class TestRerank(FakeModel, PoolerContract):
    variant = {"task": "rerank"}


class TestClassify(FakeModel, PoolerContract):
    variant = {"task": "classify", "labels": ("a", "b", "c"), "max_batch_texts": 7}


def test_layout_arranges_one_text_or_two() -> None:
    layout = TextLayout(before=(1,), between=(2, 2), after=(3,), types=True)
    alone, pair = layout.arrange([7, 8], num_prompt=1), layout.arrange([7, 8], [9])

    assert alone.token_ids.tolist() == [1, 7, 8, 3]
    assert (alone.second_from, alone.num_prompt) == (None, 2)
    assert pair.token_ids.tolist() == [1, 7, 8, 2, 2, 9, 3]
    assert (pair.second_from, pair.num_prompt) == (5, 0)
    assert (layout.num_added(is_pair=False), layout.num_added(is_pair=True)) == (2, 4)


class _Neighbourly(FakePooler):
    """Rows depend on the whole pass, as in a batch without a mask."""

    def pool(self, inputs: Sequence[PoolerInput]) -> np.ndarray[Any, np.dtype[np.float32]]:
        rows = super().pool(inputs)
        return rows + np.float32(0.01) * rows.mean(axis=0)


def test_suite_finds_rows_that_depend_on_their_neighbours() -> None:
    pooler, suite = _Neighbourly(FakePoolerOptions(is_normalized=False)), PoolerContract()
    encode, arrange = pooler.tokenizer.encode, pooler.capabilities.text.arrange
    inputs = [arrange(encode(text, False)) for text in ("one", "two and three", "four")]

    assert isinstance(pooler, Pooler)
    with pytest.raises(AssertionError, match="several inputs in one pass"):
        suite.test_rows_are_those_of_each_input_alone(pooler, inputs)
