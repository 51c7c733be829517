"""``/api/embed`` and its former address ``/api/embeddings``: embeddings of texts.

Texts that are too long are shortened at their end unless ``truncate`` is false, as Ollama does.
"""

from __future__ import annotations

import time
from typing import Any

from attrs import evolve

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.surface import Chunk, Reply, ReplyRoute, new_id
from enginehouse.contract.types import PoolingRequest, PoolText
from enginehouse.contract.vectors import write_vectors
from enginehouse_ollama.bodies import EmbedBody, EmbeddingsBody
from enginehouse_ollama.keep_alive import apply_keep_alive, may_manage, read_keep_alive
from enginehouse_ollama.requests import known_name

__all__ = ["embed_routes"]


async def _embed(call: Call) -> Reply:
    """``/api/embed``: one vector per text, and the tokens of all."""
    began_ns, body = time.perf_counter_ns(), call.body
    texts = _texts(body.input)
    answer: Chunk = {"model": body.model, "embeddings": []}
    if texts in ((), ("",)):
        await _load(call)
        return Reply(answer)
    is_list = isinstance(call.body.input, list)
    return Reply(answer | await _vectors(call, texts, "input", began_ns, is_list=is_list))


def _texts(given: Any) -> tuple[str, ...]:
    """Read a text or a list of texts. Raises InvalidRequest."""
    texts = given if isinstance(given, list) else [] if given is None else [given]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            path = f"input[{index}]" if isinstance(given, list) else "input"
            raise InvalidRequest(f"{path}: must be a string", path)
    return tuple(texts)


async def _embeddings(call: Call) -> Reply:
    """``/api/embeddings``: the vector of one text."""
    if not call.body.prompt:
        await _load(call)
        return Reply({"embedding": []})
    found = await _vectors(call, (call.body.prompt,), "prompt", time.perf_counter_ns(), is_list=False)
    return Reply({"embedding": found["embeddings"][0]})


async def _load(call: Call) -> None:
    """Load the model, or unload it, if the caller may."""
    name, keep_alive = known_name(call, call.body.model), read_keep_alive(call.body.keep_alive)
    if not may_manage(call):
        call.ignore("keep_alive")
    elif keep_alive == 0:
        await call.server.unload(name)
    else:
        await call.server.load(name)
        apply_keep_alive(call, keep_alive, name)


async def _vectors(call: Call, texts: tuple[str, ...], path: str, began_ns: int, *, is_list: bool) -> Chunk:
    """Return the members of ``/api/embed`` that are computed.

    Args:
        path: member of the body with the texts.
        began_ns: arrival of the request, in the time of ``perf_counter_ns``.
        is_list: that member is a list of texts.
    """
    body, name = call.body, known_name(call, call.body.model)
    if "" in texts:
        where = f"{path}[{texts.index('')}]"
        raise InvalidRequest(f"{where}: must not be empty", where)
    for option in body.options:
        call.ignore(f"options.{option}")
    apply_keep_alive(call, read_keep_alive(body.keep_alive), name)
    request = PoolingRequest(
        request_id=new_id("embd-"),
        model=name,
        task="embed",
        inputs=tuple(map(PoolText, texts)),
        path=path,
        is_list=is_list,
        truncate="end" if body.truncate else "none",
        dimensions=body.dimensions,
    )
    result = await call.server.pool(request)
    return {
        "embeddings": await write_vectors(result.array),
        "total_duration": time.perf_counter_ns() - began_ns,
        "prompt_eval_count": sum(result.num_tokens),
    }


def embed_routes() -> list[ReplyRoute]:
    """Return the routes."""
    route = ReplyRoute(
        path="/api/embed",
        name="ollama_embed",
        summary="Embeddings of texts, as in Ollama",
        body=EmbedBody,
        limits="all",
        handle=_embed,
    )
    former = evolve(route, path="/api/embeddings", name="ollama_embeddings", body=EmbeddingsBody, handle=_embeddings)
    return [route, former]
