"""Finds models whose context cannot hold a prompt, before one of several is chosen.

Counts are exact, since each model renders and tokenizes the prompt as it would to answer it; this requires a loaded
model. A prompt with fewer bytes than a context has tokens fits without being counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from enginehouse.contract.errors import ContextLengthExceeded, EnginehouseError
from enginehouse.contract.types import GenerateRequest
from enginehouse.serving import LoadedModel, ModelManager

__all__ = ["CountTokens", "find_too_long"]

CountTokens = Callable[[GenerateRequest, LoadedModel], Awaitable[int]]
"""Counts the tokens of a request's prompt for a model."""

_TEMPLATE_TOKENS = 1024
"""Tokens allowed for the text that templates add to messages; a model whose template adds more refuses when tried."""

_PATIENCE_S = 2.0
"""Maximum wait for a busy model; after it the prompt is assumed to fit."""


async def find_too_long(
    request: GenerateRequest, names: Iterable[str], manager: ModelManager, count: CountTokens
) -> dict[str, ContextLengthExceeded]:
    """Return the models whose context cannot hold the prompt, by name, with the error that each would raise."""
    if any(message.parts for message in request.messages or ()):
        return {}  # images are read only after a model is chosen
    num_bytes = _num_bytes(request)
    models = [model for name in names if (model := _loaded(manager, name)) is not None]
    unsure = [
        model
        for model in models
        if num_bytes + _TEMPLATE_TOKENS > model.info.max_context and not model.info.engine.takes_messages
    ]
    errors = await asyncio.gather(*(_check(request, model, count) for model in unsure))
    return {model.name: error for model, error in zip(unsure, errors, strict=True) if error is not None}


async def _check(request: GenerateRequest, model: LoadedModel, count: CountTokens) -> ContextLengthExceeded | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = await count(request, model)
    except (EnginehouseError, TimeoutError):
        return None  # the attempt reports the problem of the model or the request
    if num_tokens < (max_context := model.info.max_context):
        return None
    return ContextLengthExceeded(num_tokens, max_context, "prompt" if request.messages is None else "messages")


def _loaded(manager: ModelManager, name: str) -> LoadedModel | None:
    try:
        return manager.get(name)
    except EnginehouseError:
        return None


def _num_bytes(request: GenerateRequest) -> int:
    """Bytes of all client text in a prompt: an upper bound of its tokens for any tokenizer."""
    if request.token_ids is not None:
        return len(request.token_ids)
    if request.messages is None:
        return _bytes_of(request.text or "") + _bytes_of(request.suffix or "")
    num_bytes = _bytes_of(repr(request.template_variables))
    for message in request.messages:
        texts = (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls))
        num_bytes += sum(map(_bytes_of, texts))
    tools = request.tool_use.callable if request.tool_use is not None else ()
    return num_bytes + sum(2 * _bytes_of(repr(tool.definition)) for tool in tools)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
