"""Requests to servers of Text Embeddings Inference (TEI), and their answers in the form of others. Does no I/O.

Source: the OpenAPI description of TEI 1.7.1 (``docs/openapi.json``), and its router for the header with the number of
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import PoolingInfo, PoolingRequest, PoolTask, ScoreKind
from enginehouse_remote.pooling import Part, RowAnswer, RowItem, RowUsage, inputs_of, queries_of

__all__ = ["TOKENS_HEADER", "ServedModel", "answer_of", "parts_of", "read_info", "root_of"]

TOKENS_HEADER = "x-compute-tokens"
_TASKS: Mapping[str, PoolTask] = {"embedding": "embed", "reranker": "rerank", "classifier": "classify"}
_SCORES: Mapping[PoolTask, ScoreKind] = {"embed": "embedding", "rerank": "sigmoid", "classify": "softmax"}


class _Head(msgspec.Struct):
    id2label: dict[int, str] = {}


class ServedModel(msgspec.Struct):
    """Response of ``/info``, as far as it is used."""

    model_id: str
    model_type: dict[str, _Head]
    max_input_length: int
    max_client_batch_size: int

    @property
    def task(self) -> PoolTask | None:
        """Task of the model; None for one that is not known here."""
        return next((task for name, task in _TASKS.items() if name in self.model_type), None)

    @property
    def pooling(self) -> PoolingInfo | None:
        """Properties of the rows; None for embeddings, whose size is not reported."""
        task = self.task
        if task is None or task == "embed":
            return None
        if task == "rerank":
            return PoolingInfo(max_tokens=self.max_input_length, dimensions=1, activation="sigmoid")
        labels = tuple(label for _, label in sorted(self.model_type["classifier"].id2label.items()))
        width = len(labels)
        return PoolingInfo(max_tokens=self.max_input_length, dimensions=width, labels=labels, activation="softmax")


class _Rank(msgspec.Struct):
    index: int
    score: float


class _Prediction(msgspec.Struct):
    label: str
    score: float


_ANSWERS: Mapping[PoolTask, Any] = {
    "embed": list[list[float]],
    "rerank": list[_Rank],
    "classify": list[list[_Prediction]],
}


def root_of(url: str) -> str:
    """Return the URL of ``/info`` and ``/embed``, which are not below ``/v1``."""
    return url.removesuffix("/v1")


def read_info(said: Any) -> ServedModel | None:
    """Return the response of ``/info``; None if it is not that of TEI, or of a task that is not known here."""
    try:
        found = msgspec.convert(said, ServedModel, strict=False)  # the numbers of labels are texts
    except msgspec.ValidationError:
        return None
    usable = found.task is not None and min(found.max_input_length, found.max_client_batch_size) > 0
    return found if usable else None


def parts_of(request: PoolingRequest, max_inputs: int) -> list[Part]:
    """Return the requests that give the rows, each with as many inputs as a server takes.

    Raises:
        UnsupportedParameter: a member of the request has no place in the server's body.
    """
    common = _common(request)
    if request.task == "rerank":
        return [
            Part(
                "/rerank",
                {**common, "query": query, "texts": [request.inputs[index].second or "" for index in part]},
                part,
                _ANSWERS["rerank"],
            )
            for query, indices in queries_of(request).items()
            for part in _parts(indices, max_inputs)
        ]
    inputs: Sequence[Any] = inputs_of(request)
    if request.task == "classify":
        if any(one.token_ids is not None for one in request.inputs):
            raise UnsupportedParameter(f"{request.path}: the remote server (tei) classifies texts only", request.path)
        inputs = [[text] for text in inputs]  # a list of two texts would be a pair
    path = "/predict" if request.task == "classify" else "/embed"
    return [
        Part(path, {**common, "inputs": [inputs[index] for index in part]}, part, _ANSWERS[request.task])
        for part in _parts(range(len(inputs)), max_inputs)
    ]


def _parts(indices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    return [tuple(indices[start : start + most]) for start in range(0, len(indices), most)]


def _common(request: PoolingRequest) -> dict[str, Any]:
    length = "max_tokens_per_doc" if request.task == "rerank" else "truncate_prompt_tokens"
    refused = {
        length: request.max_tokens if request.truncate != "none" else None,
        "dimensions": request.dimensions,
        "add_special_tokens": request.add_special_tokens,
    }
    for name, value in refused.items():
        if value is not None:
            raise UnsupportedParameter(f"{name}: the remote server (tei) has no such field", name)
    body: dict[str, Any] = {"truncate": request.truncate != "none"}
    if request.truncate != "none":
        body["truncation_direction"] = "Left" if request.truncate == "start" else "Right"
    if request.task == "embed":
        prompt = {"prompt_name": request.prompt_name} if request.prompt_name else {}
        return {**body, "normalize": request.normalize, **prompt}
    return {**body, "raw_scores": request.raw_scores}


def answer_of(request: PoolingRequest, value: Any, num_tokens: str, info: PoolingInfo | None) -> RowAnswer:
    """Return an answer in the form of other servers.

    Args:
        value: decoded as the type of its part.
        num_tokens: the header of the answer; "" if there is none, which counts nothing.

    Raises:
        ValueError: an answer lacks a label, or has one that the model does not have.
    """
    score_kind: ScoreKind = "logit" if request.raw_scores and request.task != "embed" else _SCORES[request.task]
    usage = RowUsage(int(num_tokens) if num_tokens.isascii() and num_tokens.isdecimal() else 0)
    if request.task == "rerank":
        ranks = [RowItem(one.index, relevance_score=one.score) for one in value]
        return RowAnswer(results=ranks, usage=usage, score_kind=score_kind)
    if request.task == "embed":
        return RowAnswer(data=[RowItem(embedding=row) for row in value], usage=usage, score_kind=score_kind)
    labels = info.labels if info is not None else ()
    rows = [{one.label: one.score for one in row} for row in value]
    if any(set(row) != set(labels) for row in rows):
        raise ValueError(f"it has other labels than {', '.join(labels)}")
    items = [RowItem(probs=[row[label] for label in labels]) for row in rows]
    return RowAnswer(data=items, usage=usage, score_kind=score_kind)
