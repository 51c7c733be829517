"""A pass divided between threads gives the rows of one that is computed as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([5], 4, [[0]]),
        ([9, 1, 1, 1, 8, 1, 1, 1, 1], 1, [[1, 2, 3, 5, 6, 7, 8, 4, 0]]),
        ([4, 4, 4, 4], 2, [[0, 1], [2, 3]]),
        ([100, 1, 1], 2, [[1, 2], [0]]),
        ([3, 2, 1], 8, [[2], [1], [0]]),
    ],
)
def test_parts_have_all_texts_once_and_similar_numbers_of_tokens(
    lengths: list[int], most: int, expected: list[list[int]]
) -> None:
    from enginehouse_hf.pooling.threads import divide

    assert [part.tolist() for part in divide(lengths, most)] == expected


def test_the_error_of_a_part_is_raised_when_all_have_ended() -> None:
    from enginehouse_hf.pooling.threads import PassThreads

    threads, ended, both = PassThreads(2), list[int](), threading.Barrier(2)

    def compute(part: Any) -> None:
        both.wait(60)  # at the same time
        if 0 in part:
            raise RuntimeError("the first part")
        ended.append(len(part))

    with pytest.raises(RuntimeError, match="the first part"):
        threads.run(compute, [100, 100])
    threads.close()

    assert ended == [1]


@pytest.mark.parametrize("model", [("bert", 0), ("xlm-roberta", 2), ("modernbert", 0), ("mpnet", 1)])
def test_rows_do_not_depend_on_the_number_of_threads(
    model: tuple[str, int],
    random_encoder: Callable[..., Path],
    open_pooler: Callable[..., Any],
    arranged: Callable[..., list[Any]],
    short_texts: list[str],
) -> None:
    folder = random_encoder(*model)
    one, several = open_pooler(folder), open_pooler(folder, threads=3)
    inputs = arranged(one, short_texts * 3)

    assert np.abs(one.pool(inputs) - several.pool(inputs)).max() <= 1e-5
    assert np.abs(one.pool(inputs[:1]) - several.pool(inputs[:1])).max() <= 1e-5


@pytest.mark.parametrize(("kind", "num_fused"), [("bert", 3), ("xlm-roberta", 3), ("modernbert", 0), ("qwen3", 0)])
def test_layers_of_berts_form_are_fused(kind: str, num_fused: int, random_encoder: Callable[..., Path]) -> None:
    from transformers import AutoModel

    from enginehouse_hf.linears import is_supported
    from enginehouse_hf.pooling.bert import fuse_layers

    model = AutoModel.from_pretrained(random_encoder(kind))

    assert len(fuse_layers(model)) == (num_fused if is_supported() else 0)
