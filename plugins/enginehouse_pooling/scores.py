"""``/v1/score`` and ``/v1/classify`` of vLLM, and ``/predict`` of TEI.

Sources: https://docs.vllm.ai/en/latest/models/pooling_models;
https://github.com/huggingface/text-embeddings-inference, ``router/src/http/types.rs``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import NOTHING, evolve, frozen

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.rows import row
from enginehouse.contract.surface import Chunk, Reply, ReplyRoute, new_id
from enginehouse.contract.types import PoolingRequest, PoolingResult, PoolTask, PoolText
from enginehouse_pooling.inputs import (
    FORMS,
    INPUT,
    USAGE,
    PoolingBody,
    cut_of,
    has_list,
    model_of,
    one_or_many,
    read_inputs,
    usage_of,
)

__all__ = ["ClassifyBody", "PredictBody", "ScoreBody", "score_routes"]

_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_RAW = "Return logits instead of scores from 0 to 1."


@frozen(kw_only=True)
class _ScoringBody(PoolingBody):
    raw_scores: bool = row(_RAW, default=False)
    use_activation: bool = row("vLLM's opposite of `raw_scores`.", default=True)

    @property
    def asks_for_logits(self) -> bool:
        """True if scores are returned as the model gives them."""
        return self.raw_scores or not self.use_activation


@frozen(kw_only=True)
class ScoreBody(_ScoringBody):
    """Pairs of texts: one with each of several, or as many with as many."""

    text_1: Any = row("One text, or several.", schema=_TEXTS)
    text_2: Any = row("The texts to score with the first ones.", schema=_TEXTS)
    queries: Any = row("Another name of `text_1`.", schema=_TEXTS)
    documents: Any = row("Another name of `text_2`.", schema=_TEXTS)
    data_1: Any = row("Another name of `text_1`.", schema=_TEXTS)
    data_2: Any = row("Another name of `text_2`.", schema=_TEXTS)


@frozen(kw_only=True)
class ClassifyBody(_ScoringBody):
    """Texts to classify."""

    input: Any = row(FORMS, default=NOTHING, schema=INPUT)


@frozen(kw_only=True)
class PredictBody(PoolingBody):
    """Texts or pairs of texts to classify, as in Text Embeddings Inference."""

    inputs: Any = row(
        "A text, a pair as a list of two texts, or a list of lists of one or two texts.",
        default=NOTHING,
        schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
                },
            ]
        },
    )
    raw_scores: bool = row(_RAW, default=False)


async def _pool(
    call: Call, task: PoolTask, inputs: Sequence[PoolText], path: str, *, raw_scores: bool, is_list: bool = True
) -> tuple[PoolingRequest, PoolingResult]:
    body = call.body
    part, most = cut_of(call)
    request = PoolingRequest(
        request_id=new_id("pool-"),
        model=model_of(call, task),
        task=task,
        inputs=tuple(inputs),
        path=path,
        is_list=is_list,
        truncate=part,
        max_tokens=most,
        raw_scores=raw_scores,
        priority=body.priority,
    )
    return request, await call.server.pool(request)


def _answer(request: PoolingRequest, result: PoolingResult, data: list[Chunk]) -> Reply:
    answer = {"id": request.request_id, "object": "list", "created": int(time.time()), "model": result.model}
    shortened = {} if request.truncate == "none" else {"num_truncated": result.num_truncated}
    return Reply({**answer, "data": data, "usage": usage_of(result), "score_kind": result.score_kind, **shortened})


async def _score(call: Call) -> Reply:
    """Scores of pairs."""
    firsts, _ = _side(call.body, "text_1", "queries", "data_1")
    seconds, path = _side(call.body, "text_2", "documents", "data_2")
    if len(firsts) == 1:
        firsts = [firsts[0]] * len(seconds)
    if len(firsts) != len(seconds):
        message = f"{path}: must hold as many texts as the other side, {len(firsts)}, not {len(seconds)}"
        raise InvalidRequest(message, path)
    pairs = [PoolText(first, second=second) for first, second in zip(firsts, seconds, strict=True)]
    request, result = await _pool(call, "rerank", pairs, path, raw_scores=call.body.asks_for_logits)
    scores = result.array[:, 0].tolist()
    return _answer(
        request, result, [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    )


def _side(body: ScoreBody, *names: str) -> tuple[Sequence[str], str]:
    """Return the texts of one side of the pairs, and the name by which the body has them."""
    given = [name for name in names if getattr(body, name) is not None]
    if not given:
        raise InvalidRequest(f"{names[0]}: is required", names[0])
    if len(given) > 1:
        raise InvalidRequest(f"{given[1]}: not allowed together with {given[0]}; give one of them", given[1])
    return one_or_many(getattr(body, given[0]), given[0]), given[0]


async def _classify(call: Call) -> Reply:
    """Probabilities of all labels, and the best label, of each text."""
    inputs = read_inputs(call.body.input, "input")
    request, result = await _pool(
        call,
        "classify",
        inputs,
        "input",
        raw_scores=call.body.asks_for_logits,
        is_list=has_list(call.body.input),
    )
    labels = _labels(result)
    best = result.array.argmax(axis=1).tolist()
    data: list[Chunk] = [
        {"index": index, "label": labels[best[index]], "probs": probs, "num_classes": result.width}
        for index, probs in enumerate(result.array.tolist())
    ]
    return _answer(request, result, data)


def _labels(result: PoolingResult) -> Sequence[str]:
    """Return the names of the columns; those that Transformers give if the model has none."""
    return result.labels or [f"LABEL_{column}" for column in range(result.width)]


async def _predict(call: Call) -> Reply:
    """TEI's response: all labels with their scores, best first; a list of these for a list of inputs."""
    given, path = call.body.inputs, "inputs"
    is_many = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    items = given if is_many else [given]
    paths = [f"{path}[{index}]" for index in range(len(items))] if is_many else [path]
    inputs = [_text_or_pair(item, where) for item, where in zip(items, paths, strict=True)]
    _, result = await _pool(call, "classify", inputs, path, raw_scores=call.body.raw_scores, is_list=is_many)
    labels = _labels(result)
    ranked: list[list[Chunk]] = [
        sorted(
            ({"label": label, "score": score} for label, score in zip(labels, scores, strict=True)),
            key=lambda one: -one["score"],
        )
        for scores in result.array.tolist()
    ]
    return Reply(msgspec.json.encode(ranked) if is_many else ranked[0])


def _text_or_pair(value: Any, path: str) -> PoolText:
    """Read a text, or a list of one or two of them."""
    texts = one_or_many(value, path)
    if len(texts) > 2:
        raise InvalidRequest(f"{path}: must be a text or a list of two, not of {len(texts)}", path)
    if not all(texts):
        raise InvalidRequest(f"{path}: must not be empty", path)
    return PoolText(texts[0], second=texts[1] if len(texts) == 2 else None)


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    properties = {
        "id": {"type": "string"},
        "object": {"const": "list"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "data": {"type": "array", "items": item},
        "usage": USAGE,
        "score_kind": {"enum": ["sigmoid", "softmax", "logit", "cosine"]},
        "num_truncated": {"type": "integer", "description": "Inputs that were shortened; only with `truncate`."},
    }
    required = [name for name in properties if name != "num_truncated"]
    return {"type": "object", "properties": properties, "required": required}


_SCORE = {
    "type": "object",
    "properties": {"index": {"type": "integer"}, "object": {"const": "score"}, "score": {"type": "number"}},
    "required": ["index", "object", "score"],
}
_CLASSES = {
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "label": {"type": "string"},
        "probs": {"type": "array", "items": {"type": "number"}},
        "num_classes": {"type": "integer"},
    },
    "required": ["index", "label", "probs", "num_classes"],
}


def score_routes() -> list[ReplyRoute]:
    """Return the routes."""
    score = ReplyRoute(
        path="/v1/score",
        name="score",
        summary="Scores of pairs of texts",
        body=ScoreBody,
        limits="all",
        response_schema=_list_of(_SCORE),
        handle=_score,
    )
    classify = ReplyRoute(
        path="/v1/classify",
        name="classify",
        summary="Classes of texts",
        body=ClassifyBody,
        limits="all",
        response_schema=_list_of(_CLASSES),
        handle=_classify,
    )
    return [
        score,
        evolve(score, path="/score"),
        classify,
        evolve(classify, path="/classify"),
        ReplyRoute(
            path="/predict",
            name="tei_predict",
            summary="Classes of texts, as in Text Embeddings Inference",
            body=PredictBody,
            limits="all",
            response_schema={"type": "array"},
            handle=_predict,
        ),
    ]
