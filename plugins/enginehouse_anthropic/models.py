"""Models in Anthropic's shape."""

from __future__ import annotations

from datetime import UTC, datetime

from enginehouse.contract.calls import Call, ModelEntry
from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.surface import Chunk, Reply

__all__ = ["list_models", "show_model"]

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 1000


async def list_models(call: Call) -> Reply:
    """Return a page of the caller's models.

    Raises:
        InvalidRequest: the page is not one.
    """
    models, query = list(call.server.models()), call.query
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= _MAX_LIMIT:
        raise InvalidRequest(f"limit: must be a number from 1 to {_MAX_LIMIT}, not {quoted(limit)}", "limit")
    names = [model.name for model in models]
    before, after = query.get("before_id"), query.get("after_id")
    for name, asked in (("before_id", before), ("after_id", after)):
        if asked is not None and asked not in names:
            raise InvalidRequest(f"{name}: no model has the id {quoted(asked)}", name)
    if before is not None:
        if after is not None:
            call.ignore("after_id")
        models = models[: names.index(before)]
        page, has_more = models[-int(limit) :], len(models) > int(limit)
    else:
        models = models[names.index(after) + 1 :] if after is not None else models
        page, has_more = models[: int(limit)], len(models) > int(limit)
    return Reply(
        {
            "data": [_model(model, model.name) for model in page],
            "has_more": has_more,
            "first_id": page[0].name if page else None,
            "last_id": page[-1].name if page else None,
        }
    )


async def show_model(call: Call) -> Reply:
    """Return one model, by its name or an alias.

    Raises:
        ModelNotFound: there is none for the caller.
    """
    asked = call.path["model_id"].removeprefix("/")
    return Reply(_model(call.server.model(asked), asked))


def _model(model: ModelEntry, name: str) -> Chunk:
    max_context = model.info.max_context if model.info is not None else None
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_context,
        "max_tokens": max_context,
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }
