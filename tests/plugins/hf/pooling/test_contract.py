"""The poolers of the hf backend keep the contract, packed and by texts of equal length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.backend_contract import ModelUnderTest
from enginehouse_testkit.pooler_contract import PoolerContract

pytestmark = pytest.mark.hf


class _TinyPoolerContract(PoolerContract):
    kind: str
    num_labels = 0
    settings: ClassVar[dict[str, Any]] = {}
    max_difference = 1e-5

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, random_encoder: Callable[..., Path]) -> ModelUnderTest:
        path = random_encoder(cls.kind, cls.num_labels)
        options = HfOptions(device="cpu", threads=1, max_batch_tokens=256, **cls.settings)
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=options)


class TestBert(_TinyPoolerContract):
    kind = "bert"


class TestReranker(_TinyPoolerContract):
    kind, num_labels = "xlm-roberta", 1


class TestClassifier(_TinyPoolerContract):
    kind, num_labels = "bert", 3


class TestDecoder(_TinyPoolerContract):
    kind = "qwen3"
    settings: ClassVar[dict[str, Any]] = {"task": "embed"}


class TestEqualLengths(_TinyPoolerContract):
    kind = "mpnet"
