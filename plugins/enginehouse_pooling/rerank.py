"""``/v1/rerank`` and its other addresses: Jina's and Cohere's form, and that of TEI for bodies with ``texts``.

Sources: https://jina.ai/reranker; https://docs.cohere.com/reference/rerank;
https://github.com/huggingface/text-embeddings-inference, ``router/src/http/types.rs``;
https://github.com/ggml-org/llama.cpp, ``tools/server/README.md``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attrs import NOTHING, evolve, frozen

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.rows import row
from enginehouse.contract.surface import Chunk, Reply, ReplyRoute, new_id
from enginehouse.contract.types import PoolingRequest, PoolingResult, PoolText
from enginehouse_pooling.inputs import USAGE, Cut, PoolingBody, cut_of, model_of, read_texts, usage_of

__all__ = ["RerankBody", "rerank_routes"]

_TEXTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        ]
    },
}


@frozen(kw_only=True)
class RerankBody(PoolingBody):
    """A query and documents, of which the response has the scores, best first."""

    query: str = row("The text for which the documents are scored.", default=NOTHING)
    documents: Any = row("Texts, or objects with the member `text`.", schema=_TEXTS, limit=("maxItems", "max_inputs"))
    texts: Any = row(
        "TEI's name of `documents`; the response is then a list of TEI's form.",
        schema=_TEXTS,
        limit=("maxItems", "max_inputs"),
    )
    top_n: int | None = row("Return the best ones only, at most this many.", bounds=(1, 2**31 - 1))
    return_documents: bool = row("Return the text of each document.", default=False)
    return_text: bool = row("TEI's name of `return_documents`.", default=False)
    raw_scores: bool = row("Return logits instead of scores from 0 to 1.", default=False)
    max_tokens_per_doc: int | None = row(
        "Shorten each document to this many tokens; it is shortened at its end.", bounds=(1, 2**31 - 1)
    )


async def _rerank(usual_cut: Cut, call: Call) -> Reply:
    """Return the response.

    Args:
        usual_cut: part at which documents that are too long are shortened if the body does not say.
    """
    body: RerankBody = call.body
    path, documents = _documents(body)
    request = PoolingRequest(
        request_id=new_id("rerank-"),
        model=model_of(call, "rerank"),
        task="rerank",
        inputs=tuple(PoolText(body.query, second=document) for document in documents),
        path=path,
        truncate=_cut(call, usual_cut),
        max_tokens=body.max_tokens_per_doc,
        raw_scores=body.raw_scores,
        priority=body.priority,
    )
    result = await call.server.pool(request)
    scores = result.array[:, 0].tolist()
    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n]
    shown = documents if body.return_documents or body.return_text else None
    if path == "texts":
        of_text = [{} if shown is None else {"text": shown[index]} for index in best]
        return Reply(
            [{"index": index, "score": scores[index], **text} for index, text in zip(best, of_text, strict=True)]
        )
    return Reply(_answer(request, result, [_result(index, scores[index], shown) for index in best]))


def _documents(body: RerankBody) -> tuple[str, list[str]]:
    """Return the member of the body that has the documents, and their texts."""
    if body.documents is not None and body.texts is not None:
        raise InvalidRequest("texts: not allowed together with documents; give one of them", "texts")
    path = "documents" if body.texts is None else "texts"
    given = getattr(body, path)
    if given is None:
        raise InvalidRequest("documents: is required", "documents")
    return path, read_texts(given, path)


def _cut(call: Call, usual: Cut) -> Cut:
    """Return the part at which documents that are too long are shortened."""
    body: RerankBody = call.body
    part, most = cut_of(call, usual if body.max_tokens_per_doc is None else "end")
    if part == "none" and body.max_tokens_per_doc is not None:
        message = "max_tokens_per_doc: contradicts truncate, which refuses long texts"
        raise InvalidRequest(message, "max_tokens_per_doc")
    if most is not None:
        message = "truncate_prompt_tokens: use max_tokens_per_doc, which shortens the documents alone"
        raise InvalidRequest(message, "truncate_prompt_tokens")
    return part


def _result(index: int, score: float, shown: list[str] | None) -> Chunk:
    document = {} if shown is None else {"document": {"text": shown[index]}}
    return {"index": index, "relevance_score": score, **document}


def _answer(request: PoolingRequest, result: PoolingResult, results: list[Chunk]) -> Chunk:
    answer: Chunk = {
        "id": request.request_id,
        "object": "list",
        "model": result.model,
        "usage": usage_of(result),
        "results": results,
        "score_kind": result.score_kind,
        "meta": {"tokens": {"input_tokens": sum(result.num_tokens)}},
    }
    return answer if request.truncate == "none" else {**answer, "num_truncated": result.num_truncated}


_RESULT = {
    "type": "object",
    "properties": {
        "index": {"type": "integer"},
        "relevance_score": {"type": "number"},
        "document": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
    "required": ["index", "relevance_score"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "model": {"type": "string"},
        "usage": USAGE,
        "results": {"type": "array", "items": _RESULT},
        "score_kind": {"enum": ["sigmoid", "softmax", "logit", "cosine"]},
        "num_truncated": {"type": "integer", "description": "Pairs that were shortened; only with `truncate`."},
    },
    "required": ["id", "model", "usage", "results", "score_kind"],
}
_TEI_ANSWER = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"index": {"type": "integer"}, "score": {"type": "number"}, "text": {"type": "string"}},
        "required": ["index", "score"],
    },
}


def rerank_routes() -> list[ReplyRoute]:
    """Return the routes. Cohere's API shortens long documents, the others refuse them."""
    route = ReplyRoute(
        path="/v1/rerank",
        name="rerank",
        summary="Documents by their relevance to a query",
        body=RerankBody,
        limits="all",
        response_schema={"anyOf": [_ANSWER, _TEI_ANSWER]},
        handle=partial(_rerank, "none"),
    )
    return [
        route,
        evolve(route, path="/rerank", name="rerank_tei"),
        evolve(route, path="/v1/reranking", name="llama_reranking_v1"),
        evolve(route, path="/reranking", name="llama_reranking"),
        evolve(route, path="/v2/rerank", name="cohere_rerank", handle=partial(_rerank, "end")),
    ]
