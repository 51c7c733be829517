"""Embeddings and logits of tiny random models of many kinds are those of sentence-transformers and transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.hf, pytest.mark.slow]

Folder = Callable[..., Path]
Opened = Callable[..., Any]


def assert_rows(found: Any, expected: Any) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found - expected).max() <= 1e-5 * scale


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("bert", "packed"),
        ("xlm-roberta", "packed"),
        ("modernbert", "packed"),
        ("distilbert", "packed"),
        ("qwen3", "packed"),
        ("gemma3_text", "packed"),
        ("mobilebert", "texts of equal length"),
        ("mpnet", "texts of equal length"),
        ("deberta-v2", "texts of equal length"),
        ("t5", "texts of equal length"),
    ],
)
def test_embeddings_without_a_list_of_modules(
    random_encoder: Folder, open_pooler: Opened, arranged: Any, short_texts: list[str], *, kind: str, layers: str
) -> None:
    """Mean pooling, for a causal model the last token; in one pass, in another order, and alone.

    MobileBERT takes another attention, but its embeddings join neighbouring tokens: the numbers show it.
    """
    from sentence_transformers import SentenceTransformer

    folder = random_encoder(kind)
    expected = SentenceTransformer(str(folder), device="cpu").encode(short_texts)
    is_causal = kind in {"qwen3", "gemma3_text"}
    pooler = open_pooler(folder, **({"task": "embed"} if is_causal else {}))
    inputs = arranged(pooler, short_texts)

    assert pooler.info.metadata["layers"].endswith(layers)
    assert pooler.capabilities.pooling == ("lasttoken" if is_causal else "mean")
    assert_rows(pooler.pool(inputs), expected)
    assert_rows(pooler.pool(inputs[::-1]), expected[::-1])
    assert_rows(np.concatenate([pooler.pool([one]) for one in inputs]), expected)


@pytest.mark.parametrize(
    ("kind", "num_labels"),
    [("bert", 1), ("bert", 3), ("xlm-roberta", 1), ("modernbert", 1), ("deberta-v2", 1), ("mpnet", 2), ("qwen3", 1)],
)
def test_logits_of_pairs(
    random_encoder: Folder, open_pooler: Opened, arranged: Any, short_texts: list[str], *, kind: str, num_labels: int
) -> None:
    """Layout, token types and head of cross-encoders; alone, too."""
    import torch
    from sentence_transformers import CrossEncoder

    folder = random_encoder(kind, num_labels)
    pairs = [("who lives where ?", text) for text in short_texts[:-1]] + [(short_texts[1], short_texts[7])]
    oracle = CrossEncoder(str(folder), device="cpu")
    expected = oracle.predict(pairs, activation_fn=torch.nn.Identity()).reshape(len(pairs), num_labels)
    pooler = open_pooler(folder, task="rerank")
    inputs = arranged(pooler, pairs)

    assert pooler.capabilities.activation == ("sigmoid" if num_labels == 1 else "none")
    assert_rows(pooler.pool(inputs), expected)
    assert_rows(np.concatenate([pooler.pool([one]) for one in inputs]), expected)


def test_task_and_activation_are_those_of_the_files(
    random_encoder: Folder, open_pooler: Opened, tmp_path: Path
) -> None:
    """A classifier of one label reranks. Activations are read as by CrossEncoder, else as by transformers' pipeline."""
    one, three = random_encoder("bert", 1), random_encoder("bert", 3)
    classifier = open_pooler(three)
    assert classifier.info.task == "classify" and classifier.capabilities.activation == "softmax"
    assert classifier.capabilities.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert open_pooler(one).info.task == "rerank"
    folder = Path(shutil.copytree(one, tmp_path / "stated"))
    config = json.loads((folder / "config.json").read_text())
    for key, value in (
        ("sentence_transformers", {"activation_fn": "torch.nn.modules.linear.Identity"}),
        ("sbert_ce_default_activation_function", "torch.nn.modules.linear.Identity"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        assert open_pooler(folder).capabilities.activation == "none"


def test_saved_cross_encoder_is_opened(random_encoder: Folder, open_pooler: Opened, tmp_path: Path) -> None:
    """The folder that sentence-transformers writes lists the transformer only, and states the activation."""
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(random_encoder("bert", 1)), device="cpu", max_length=40).save_pretrained(str(tmp_path / "saved"))
    pooler = open_pooler(tmp_path / "saved")

    assert (pooler.info.task, pooler.capabilities.activation) == ("rerank", "sigmoid")
    assert pooler.capabilities.max_tokens == 40
