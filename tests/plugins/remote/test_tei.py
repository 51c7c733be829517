"""Servers of Text Embeddings Inference: a small one that answers as TEI's API description says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import GenerationFailed, InvalidRequest, ModelLoadError, UnsupportedParameter
from enginehouse.contract.types import PoolingRequest, PoolTask, PoolText
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.engine import RemoteEngine
from enginehouse_remote.options import RemoteOptions

pytestmark = pytest.mark.remote

LABELS = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}


def info(**model_type: Any) -> dict[str, Any]:
    """The response of ``/info`` for a model that takes two inputs at once."""
    limits = {"max_concurrent_requests": 512, "max_input_length": 128, "max_batch_tokens": 2048}
    rest = {"max_client_batch_size": 2, "auto_truncate": False, "tokenization_workers": 1, "version": "1.7.1"}
    return {"model_id": "a/b", "model_dtype": "float32", "model_type": model_type, **limits, **rest}


async def answers(request: dict[str, Any], wire: Any) -> None:
    """Rows of the first letters' numbers, in TEI's forms and order: best first."""
    if "texts" in request:
        ranks = [{"index": index, "score": ord(text[0]) / 128} for index, text in enumerate(request["texts"])]
        body: Any = sorted(ranks, key=lambda rank: -rank["score"])
    elif "raw_scores" in request:
        scores = [min(ord(text[0]) / 128, 1.0) for (text,) in request["inputs"]]
        both = [[{"label": "good", "score": one}, {"label": "bad", "score": 1 - one}] for one in scores]
        body = [sorted(one, key=lambda prediction: -prediction["score"]) for one in both]
    else:
        body = [[3.0 * len(text), 4.0 * len(text)] for text in request["inputs"]]
    wire.head(content_type="application/json", x_compute_tokens="7")
    wire.writer.write(json.dumps(body).encode())


async def open_engine(server: Any, **options: Any) -> RemoteEngine:
    source = ModelSource(server.url)
    return await asyncio.to_thread(RemoteBackend().open, source, RemoteOptions(**options), lambda share, text: None)


def asked(task: PoolTask, *texts: str, **fields: Any) -> PoolingRequest:
    pairs = [PoolText("q", second=text) if task == "rerank" else PoolText(text) for text in texts]
    return PoolingRequest(task=task, inputs=tuple(pairs), **fields)


@pytest.mark.parametrize("kind", ["auto", "tei"])
async def test_embeddings_are_asked_in_parts(small_server: Any, kind: str) -> None:
    server = await small_server(answers, info=info(embedding={"pooling": "mean"}))
    engine = await open_engine(server, kind=kind)
    result = await engine.pool(asked("embed", "a", "bb", "c", truncate="start", prompt_name="query"))
    plain = await engine.pool(asked("embed", "bb", normalize=False))
    await engine.close()

    assert (engine.info.task, engine.info.max_context, engine.info.metadata["remote_model"]) == ("embed", 128, "a/b")
    assert np.allclose(result.array, [[0.6, 0.8]] * 3)
    assert plain.array.tolist() == [[6.0, 8.0]]
    assert (sum(result.num_tokens), result.score_kind) == (14, "embedding")
    assert server.paths == ["/embed"] * 3
    shortened = {"truncate": True, "truncation_direction": "Left", "normalize": True, "prompt_name": "query"}
    assert server.requests == [
        {**shortened, "inputs": ["a", "bb"]},
        {**shortened, "inputs": ["c"]},
        {"truncate": False, "normalize": False, "inputs": ["bb"]},
    ]


async def test_scores_return_to_their_documents(small_server: Any) -> None:
    server = await small_server(answers, info=info(reranker=LABELS))
    engine = await open_engine(server)
    scores = await engine.pool(asked("rerank", "0", "@", " "))
    logits = await engine.pool(asked("rerank", "@", raw_scores=True))
    await engine.close()

    assert engine.info.task == "rerank"
    assert scores.array[:, 0].tolist() == [0.375, 0.5, 0.25]
    assert (scores.score_kind, logits.score_kind) == ("sigmoid", "logit")
    assert server.paths == ["/rerank"] * 3
    assert server.requests[0] == {"query": "q", "texts": ["0", "@"], "raw_scores": False, "truncate": False}
    assert server.requests[2]["raw_scores"] is True


async def test_documents_cannot_be_shortened_to_a_length(small_server: Any) -> None:
    engine = await open_engine(await small_server(answers, info=info(reranker=LABELS)))
    with pytest.raises(UnsupportedParameter) as refused:
        await engine.pool(asked("rerank", "0", truncate="end", max_tokens=3))
    await engine.close()

    assert refused.value.param == "max_tokens_per_doc"


async def test_probabilities_have_the_order_of_the_labels(small_server: Any) -> None:
    server = await small_server(answers, info=info(classifier=LABELS))
    engine = await open_engine(server)
    result = await engine.pool(asked("classify", " ", "`"))
    await engine.close()

    assert (engine.info.task, result.labels, result.score_kind) == ("classify", ("bad", "good"), "softmax")
    assert result.array.tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert server.paths == ["/predict"]
    assert server.requests[0]["inputs"] == [[" "], ["`"]]


async def test_what_it_has_no_field_for_is_refused_and_its_errors_are_passed_on(small_server: Any) -> None:
    async def refuses(request: dict[str, Any], wire: Any) -> None:
        wire.body({"error": "`inputs` must have less than 128 tokens", "error_type": "Validation"}, 413)

    async def fails(request: dict[str, Any], wire: Any) -> None:
        wire.body({"error": "Inference failed", "error_type": "Backend"}, 424)

    described = info(embedding={"pooling": "cls"})
    engine = await open_engine(await small_server(refuses, info=described))
    for name, fields in (
        ("dimensions", {"dimensions": 2}),
        ("add_special_tokens", {"add_special_tokens": True}),
        ("truncate_prompt_tokens", {"truncate": "end", "max_tokens": 3}),
    ):
        with pytest.raises(UnsupportedParameter) as refused:
            await engine.pool(asked("embed", "a", **fields))
        assert refused.value.param == name
    with pytest.raises(InvalidRequest, match="less than 128 tokens"):
        await engine.pool(asked("embed", "a"))
    await engine.close()
    with pytest.raises(ModelLoadError, match="for 'embed', not for 'rerank'"):
        await open_engine(await small_server(fails, info=described), task="rerank")
    engine = await open_engine(await small_server(fails, info=described))
    with pytest.raises(GenerationFailed, match="Inference failed"):
        await engine.pool(asked("embed", "a"))
    await engine.close()


@pytest.mark.parametrize(("kind", "problem"), [("tei", "is .* a server of TEI"), ("auto", "lists no models")])
async def test_another_server_is_not_taken_for_one(small_server: Any, kind: str, problem: str) -> None:
    server = await small_server(answers, info={"name": "something else"})
    with pytest.raises(ModelLoadError, match=problem):
        await open_engine(server, kind=kind)
