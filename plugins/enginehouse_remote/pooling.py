"""Requests to pooling models on servers: their bodies, and the rows in their answers. Does no I/O.

Embeddings in OpenAI's form, which all kinds of servers have; rerank in Jina's (Enginehouse, vLLM, llama-server,
infinity); classify in vLLM's. What has no place in a server's body is refused with its name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.errors import UnsupportedParameter, UnsupportedTask
from enginehouse.contract.types import PoolingInfo, PoolingRequest, PoolingResult, ScoreKind
from enginehouse_remote.options import Kind

__all__ = ["Part", "RowAnswer", "RowItem", "RowUsage", "inputs_of", "parts_of", "queries_of", "result_of"]

_MAX_ROW_BYTES = 512 * 1024
"""Of one row of an answer; 16,384 numbers written as text have less."""

_FIXED_BYTES = 64 * 1024
_MOST_BYTES = 1024 * 1024 * 1024
_CLASSIFYING: tuple[Kind, ...] = ("enginehouse", "vllm")
_LOGITS: tuple[Kind, ...] = ("llamacpp",)
"""Servers whose relevance scores are logits."""


class RowItem(msgspec.Struct):
    """An entry of ``data`` or ``results``."""

    index: int | None = None
    embedding: str | list[float] | None = None
    relevance_score: float | None = None
    probs: list[float] | None = None


class RowUsage(msgspec.Struct, frozen=True):
    """Tokens of a response."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None


class RowAnswer(msgspec.Struct):
    """The used members of all three responses."""

    data: list[RowItem] = []
    results: list[RowItem] = []
    usage: RowUsage = RowUsage()
    score_kind: ScoreKind | None = None
    num_truncated: int = 0


@frozen
class Part:
    """One request to a server.

    Attributes:
        path: below the server's base URL.
        indices: inputs of the whole request that it has, in its order.
        answer: type of the answer.
    """

    path: str
    body: Mapping[str, Any]
    indices: tuple[int, ...]
    answer: Any = RowAnswer

    @property
    def max_bytes(self) -> int:
        """Maximum size of the answer."""
        return min(_FIXED_BYTES + len(self.indices) * _MAX_ROW_BYTES, _MOST_BYTES)


def parts_of(request: PoolingRequest, model: str, kind: Kind, info: PoolingInfo | None) -> list[Part]:
    """Return the requests that give the rows: one, or for rerank one per distinct query.

    Args:
        model: the model's name on the servers.
        info: the model's properties, as far as an Enginehouse server reports them.

    Raises:
        UnsupportedParameter: a member of the request has no place in the server's body.
        UnsupportedTask: these servers do not classify.
    """
    common = {"model": model, **_extras(request, kind, info)}
    everything = tuple(range(len(request.inputs)))
    if request.task == "rerank":
        return [
            Part(
                "/rerank",
                {**common, "query": query, "documents": [request.inputs[index].second or "" for index in indices]},
                tuple(indices),
            )
            for query, indices in queries_of(request).items()
        ]
    if request.task == "classify":
        if kind not in _CLASSIFYING:
            raise UnsupportedTask(model, f"remote ({kind})", request.task)
        return [Part("/classify", {**common, "input": inputs_of(request)}, everything)]
    dimensions = {} if request.dimensions is None else {"dimensions": request.dimensions}
    body = {**common, "input": inputs_of(request), "encoding_format": "base64", **dimensions}
    return [Part("/embeddings", body, everything)]


def queries_of(request: PoolingRequest) -> dict[str, list[int]]:
    """Return the distinct queries of pairs, with the indices of their inputs."""
    by_query: dict[str, list[int]] = {}
    for index, pair in enumerate(request.inputs):
        by_query.setdefault(pair.text, []).append(index)
    return by_query


def result_of(
    request: PoolingRequest, parts: Sequence[Part], answers: Sequence[RowAnswer], kind: Kind, info: PoolingInfo | None
) -> PoolingResult:
    """Return the rows of all answers.

    Raises:
        ValueError: an answer lacks rows, or has rows of different sizes.
    """
    rows: list[NDArray[np.float32] | None] = [None] * len(request.inputs)
    for part, answer in zip(parts, answers, strict=True):
        items = answer.results if request.task == "rerank" else answer.data
        for place, item in enumerate(items):
            index = place if item.index is None else item.index
            if not 0 <= index < len(part.indices) or rows[part.indices[index]] is not None:
                raise ValueError(f"the index {index} is given twice, or none of {len(part.indices)} inputs has it")
            rows[part.indices[index]] = _row(item)
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or len({len(row) for row in found}) != 1 or not len(found[0]):
        raise ValueError(f"it has {len(found)} rows for {len(rows)} inputs, or rows of different sizes")
    array = np.stack(found).astype("<f4")
    array, score_kind = _scored(request, array, answers, kind)
    num_tokens = sum(answer.usage.prompt_tokens or answer.usage.total_tokens or 0 for answer in answers)
    share, rest = divmod(max(num_tokens, 0), len(rows))
    return PoolingResult(
        rows=array.tobytes(),
        width=array.shape[1],
        # Servers report the sum only, which is what is shown and counted.
        num_tokens=tuple(share + (index < rest) for index in range(len(rows))),
        num_truncated=sum(answer.num_truncated for answer in answers),
        score_kind=score_kind,
        labels=info.labels if info is not None and len(info.labels) == array.shape[1] else (),
        prompt=_prompt(request, info),
    )


def inputs_of(request: PoolingRequest) -> list[str] | list[list[int]]:
    """Return the inputs as texts or as token ids.

    Raises:
        UnsupportedParameter: they are pairs, or both.
    """
    if any(one.second is not None for one in request.inputs):
        raise UnsupportedParameter(f"{request.path}: a remote model takes single texts", request.path)
    ids = [list(one.token_ids) for one in request.inputs if one.token_ids is not None]
    if not ids:
        return [one.text for one in request.inputs]
    if len(ids) < len(request.inputs):
        message = f"{request.path}: a remote model takes texts or token ids, not both in one request"
        raise UnsupportedParameter(message, request.path)
    return ids


def _extras(request: PoolingRequest, kind: Kind, info: PoolingInfo | None) -> dict[str, Any]:
    """Return the members beyond those that all servers have; only Enginehouse has them all."""
    given: dict[str, Any] = {}
    if request.truncate != "none":
        given["truncate"] = request.truncate
        if request.max_tokens is not None:
            name = "max_tokens_per_doc" if request.task == "rerank" else "truncate_prompt_tokens"
            given[name] = request.max_tokens
    if request.task == "embed":
        prompt = _prompt(request, info) if request.prompt_name is None else request.prompt_name
        if prompt or (request.prompt_name is not None and kind == "enginehouse"):
            given["prompt_name"] = prompt
        if not request.normalize:
            given["normalize"] = False
        if request.add_special_tokens is not None:
            given["add_special_tokens"] = request.add_special_tokens
    elif request.raw_scores and kind not in _LOGITS:
        given["raw_scores"] = True
    if kind != "enginehouse" and given:
        name = next(iter(given))
        raise UnsupportedParameter(f"{name}: the remote server ({kind}) has no such field for {request.task}", name)
    return given


def _prompt(request: PoolingRequest, info: PoolingInfo | None) -> str:
    """Return the name of the prompt that the request asks for; empty if it leaves that to the model."""
    if request.prompt_name is not None:
        return request.prompt_name
    known = info.prompts if info is not None else {}
    return next((name for name in request.prompt_hints if name in known), "")


def _row(item: RowItem) -> NDArray[np.float32]:
    if item.relevance_score is not None:
        return np.array([item.relevance_score], np.float32)
    if item.probs is not None:
        return np.array(item.probs, np.float32)
    if isinstance(item.embedding, list):
        return np.array(item.embedding, np.float32)
    if item.embedding is None:
        raise ValueError("an entry has neither embedding nor scores")
    try:
        return np.frombuffer(base64.b64decode(item.embedding, validate=True), "<f4")
    except binascii.Error as error:
        raise ValueError(f"an embedding is not base64: {error}") from error


def _scored(
    request: PoolingRequest, array: NDArray[np.float32], answers: Sequence[RowAnswer], kind: Kind
) -> tuple[NDArray[np.float32], ScoreKind]:
    """Return the rows as the request wants them, and what they are."""
    if not np.isfinite(array).all():
        raise ValueError("it has numbers that are not finite")
    if request.task == "embed":
        if kind != "enginehouse" and request.normalize:
            array = array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), np.float32(1e-12))
        return array, "embedding"
    stated = answers[0].score_kind
    if stated is not None:
        return array, stated
    if kind in _LOGITS:
        return (array, "logit") if request.raw_scores else ((1 / (1 + np.exp(-array))).astype("<f4"), "sigmoid")
    return array, "sigmoid" if request.task == "rerank" else "softmax"
