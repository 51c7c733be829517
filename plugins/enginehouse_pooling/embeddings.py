"""``/v1/embeddings`` and ``/embedding`` of OpenAI and llama-server, ``/embed`` of TEI, ``/v2/embed`` of Cohere.

Sources: https://platform.openai.com/docs/api-reference/embeddings; https://github.com/ggml-org/llama.cpp,
``tools/server/README.md``; https://github.com/huggingface/text-embeddings-inference, ``router/src/http/types.rs``;
https://docs.cohere.com/reference/embed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import NOTHING, evolve, frozen

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.rows import row
from enginehouse.contract.surface import Reply, ReplyRoute, new_id
from enginehouse.contract.types import PoolingRequest, PoolingResult, PoolText
from enginehouse.contract.vectors import VectorFormat, write_vectors
from enginehouse_pooling.inputs import (
    FORMS,
    INPUT,
    USAGE,
    PoolingBody,
    cut_of,
    has_list,
    model_of,
    prompt_hints,
    read_inputs,
    read_texts,
    usage_of,
)

__all__ = ["CohereEmbedBody", "EmbeddingsBody", "TeiEmbedBody", "embedding_routes"]

_DIMENSIONS = "Size of the embeddings, one of those that the model was trained for. They are normalised again."
_NORMALIZE = "Scale embeddings to length 1."
_PROMPT_NAME = "Name of a prompt of the model, which is put before each text."
_INPUT_TYPE = "Kind of the texts, such as `query` or `document`; chooses a prompt, if the model has one for it."
_TEXT_BYTES, _BASE64_BYTES = 13, 6
"""Bytes of a number in a response, about."""

_EUCLIDEAN, _NO_NORM = 2, -1
"""Values of llama-server's ``embd_normalize``."""
_ROW = {"type": "array", "items": {"type": "number"}}
_ITEM = {
    "type": "object",
    "properties": {
        "object": {"const": "embedding"},
        "index": {"type": "integer"},
        "embedding": {"anyOf": [_ROW, {"type": "string", "contentEncoding": "base64"}]},
    },
    "required": ["object", "index", "embedding"],
}
_LLAMA_ITEM = {
    "type": "object",
    "properties": {"index": {"type": "integer"}, "embedding": {"type": "array", "items": _ROW}},
    "required": ["index", "embedding"],
}
_EMBEDDINGS = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": _ITEM},
        "model": {"type": "string"},
        "usage": USAGE,
        "num_truncated": {"type": "integer", "description": "Inputs that were shortened; only with `truncate`."},
    },
    "required": ["object", "data", "model", "usage"],
}


@frozen(kw_only=True)
class EmbeddingsBody(PoolingBody):
    """Texts to embed, in OpenAI's form or, with `content`, in llama-server's."""

    input: Any = row(FORMS, schema=INPUT)
    content: Any = row("The input by llama-server's name; the response then has that server's form.", schema=INPUT)
    encoding_format: Literal["float", "base64"] = row(
        "Lists of numbers, or the bytes of little-endian float32 in base64.", default="float"
    )
    dimensions: int | None = row(_DIMENSIONS, bounds=(1, 2**31 - 1))
    normalize: bool | None = row(_NORMALIZE)
    embd_normalize: int | None = row(
        "The same in llama-server's form: 2 is `true`, -1 is `false`.", schema={"enum": [_NO_NORM, _EUCLIDEAN]}
    )
    prompt_name: str | None = row(_PROMPT_NAME)
    input_type: str | None = row(_INPUT_TYPE)
    add_special_tokens: bool | None = row(
        "Put the model's special tokens around the input. Without it: around texts, not around token ids."
    )
    pooling: Any = row("Refused: the pooling is that of the model's files.", schema={"type": "string"})


@frozen(kw_only=True)
class TeiEmbedBody(PoolingBody):
    """Texts to embed, as in Text Embeddings Inference."""

    inputs: Any = row(FORMS, default=NOTHING, schema=INPUT)
    dimensions: int | None = row(_DIMENSIONS, bounds=(1, 2**31 - 1))
    normalize: bool = row(_NORMALIZE, default=True)
    prompt_name: str | None = row(_PROMPT_NAME)


@frozen(kw_only=True)
class CohereEmbedBody(PoolingBody):
    """Texts to embed, as in Cohere's API."""

    texts: Any = row("Texts.", default=NOTHING, schema={"type": "array", "items": {"type": "string"}, "minItems": 1})
    input_type: str | None = row(_INPUT_TYPE)
    embedding_types: tuple[Literal["float", "base64"], ...] = row("Forms of the vectors.", default=("float",))
    output_dimension: int | None = row(_DIMENSIONS, bounds=(1, 2**31 - 1))


def _request(call: Call, inputs: Sequence[PoolText], path: str, **options: Any) -> PoolingRequest:
    """Return the request of a body; ``options`` are further members of it."""
    body = call.body
    part, most = options.pop("cut", None) or cut_of(call)
    return PoolingRequest(
        request_id=new_id("embd-"),
        model=model_of(call, "embed"),
        task="embed",
        inputs=tuple(inputs),
        path=path,
        truncate=part,
        max_tokens=most,
        priority=body.priority,
        **options,
    )


async def _pool(call: Call, request: PoolingRequest) -> PoolingResult:
    result = await call.server.pool(request)
    if request.prompt_hints and not result.prompt:
        call.ignore("input_type")
    return result


async def _embeddings(call: Call) -> Reply:
    """OpenAI's response, or llama-server's."""
    body: EmbeddingsBody = call.body
    if body.input is not None and body.content is not None:
        raise InvalidRequest("content: not allowed together with input; give one of them", "content")
    if body.pooling is not None:
        call.leave_out("pooling", "not supported, as the pooling is that of the model's files; leave it out")
    path = "input" if body.content is None else "content"
    given = getattr(body, path)
    if given is None:
        raise InvalidRequest("input: is required", "input")
    if body.prompt_name is not None and body.input_type is not None:
        raise InvalidRequest("input_type: not allowed together with prompt_name; give one of them", "input_type")
    request = _request(
        call,
        read_inputs(given, path),
        path,
        is_list=has_list(given),
        number_bytes=_BASE64_BYTES if body.encoding_format == "base64" else _TEXT_BYTES,
        dimensions=body.dimensions,
        normalize=_normalize(body),
        prompt_name=body.prompt_name,
        prompt_hints=prompt_hints(body.input_type),
        add_special_tokens=body.add_special_tokens,
    )
    result = await _pool(call, request)
    vectors = await write_vectors(result.array, body.encoding_format)
    if path == "content":
        return Reply([{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)])
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    answer: dict[str, Any] = {"object": "list", "data": data, "model": result.model, "usage": usage_of(result)}
    if request.truncate != "none":
        answer["num_truncated"] = result.num_truncated
    return Reply(answer)


def _normalize(body: EmbeddingsBody) -> bool:
    if body.embd_normalize is None:
        return body.normalize is not False
    if body.normalize is not None:
        raise InvalidRequest("embd_normalize: not allowed together with normalize; give one of them", "embd_normalize")
    if body.embd_normalize not in (_EUCLIDEAN, _NO_NORM):
        message = f"embd_normalize: must be {_EUCLIDEAN} or {_NO_NORM}, not {body.embd_normalize}"
        raise InvalidRequest(message, "embd_normalize")
    return body.embd_normalize == _EUCLIDEAN


async def _tei(call: Call) -> Reply:
    """A list of vectors."""
    body: TeiEmbedBody = call.body
    request = _request(
        call,
        read_inputs(body.inputs, "inputs"),
        "inputs",
        is_list=has_list(body.inputs),
        dimensions=body.dimensions,
        normalize=body.normalize,
        prompt_name=body.prompt_name,
    )
    result = await _pool(call, request)
    vectors = await write_vectors(result.array)
    return Reply(b"[" + b",".join(map(bytes, vectors)) + b"]")


async def _cohere(call: Call) -> Reply:
    """Cohere's response: vectors by their form. Long texts are shortened unless the body says otherwise."""
    body: CohereEmbedBody = call.body
    texts = read_texts(body.texts, "texts")
    request = _request(
        call,
        read_inputs(texts, "texts"),
        "texts",
        cut=cut_of(call, "end"),
        number_bytes=sum(_BASE64_BYTES if form == "base64" else _TEXT_BYTES for form in set(body.embedding_types)),
        dimensions=body.output_dimension,
        prompt_hints=prompt_hints(body.input_type),
    )
    result = await _pool(call, request)
    forms: dict[VectorFormat, list[Any]] = {
        form: list(await write_vectors(result.array, form)) for form in dict.fromkeys(body.embedding_types)
    }
    meta = {"tokens": {"input_tokens": sum(result.num_tokens)}}
    return Reply(
        {"id": request.request_id, "embeddings": forms, "texts": texts, "meta": meta}
        | {"num_truncated": result.num_truncated}
    )


def embedding_routes() -> list[ReplyRoute]:
    """Return the routes that answer with vectors."""
    openai = ReplyRoute(
        path="/v1/embeddings",
        name="create_embeddings",
        summary="Embeddings of texts",
        body=EmbeddingsBody,
        limits="all",
        response_schema=_EMBEDDINGS,
        handle=_embeddings,
    )
    either = {"anyOf": [_EMBEDDINGS, {"type": "array", "items": _LLAMA_ITEM}]}
    return [
        openai,
        evolve(openai, path="/embeddings", name="llama_embeddings", response_schema=either),
        evolve(openai, path="/embedding", name="llama_embedding", response_schema=either),
        ReplyRoute(
            path="/embed",
            name="tei_embed",
            summary="Embeddings of texts, as in Text Embeddings Inference",
            body=TeiEmbedBody,
            limits="all",
            response_schema={"type": "array", "items": _ROW},
            handle=_tei,
        ),
        ReplyRoute(
            path="/v2/embed",
            name="cohere_embed",
            summary="Embeddings of texts, as in Cohere's API",
            body=CohereEmbedBody,
            limits="all",
            handle=_cohere,
        ),
    ]
