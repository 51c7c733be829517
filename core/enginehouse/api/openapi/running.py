"""Running requests and slots in the OpenAPI document. Tests hold the server to it."""

from __future__ import annotations

from typing import get_args

from enginehouse.api.openapi.answers import object_of, reference
from enginehouse.api.openapi.fields import JsonSchema
from enginehouse.contract.inspection import Phase

__all__ = ["RUNNING_SCHEMAS"]

_TEXT: JsonSchema = {"type": "string"}
_TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: JsonSchema = {"type": ["integer", "null"], "minimum": 0}
_SECONDS: JsonSchema = {"type": "number", "minimum": 0}
_SECONDS_OR_NULL: JsonSchema = {"type": ["number", "null"], "minimum": 0}
_FINISH: JsonSchema = {"enum": ["stop", "length", "tool_calls", "content_filter", None]}


def _list_of(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _many(items: JsonSchema) -> JsonSchema:
    """OpenAI's way of listing."""
    return object_of(object={"const": "list"}, data=_list_of(items))


_CHOICE = object_of(
    index=_COUNT,
    phase={"enum": [*get_args(Phase), "ended"]},
    completion_tokens=_COUNT_OR_NULL,
    kv_tokens=_COUNT_OR_NULL,
    is_thinking={"type": ["boolean", "null"]},
    finish_reason=_FINISH,
)
_SEQUENCE = object_of(
    request_id=_TEXT,
    choice=_COUNT,
    phase={"enum": list(get_args(Phase))},
    kv_tokens=_COUNT,
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
)
_PREFIX = object_of(namespace=_TEXT_OR_NULL, salt_hash=_TEXT_OR_NULL, tokens=_COUNT, hits=_COUNT)
_NULLABLE_LIST = {"type": ["array", "null"]}

RUNNING_SCHEMAS: dict[str, JsonSchema] = {
    "RunningRequest": object_of(
        {"prompts": {"type": ["array", "null"], "description": "Null unless the settings allow to show them."}},
        id=_TEXT,
        request_id=_TEXT,
        key=_TEXT_OR_NULL,
        model=_TEXT_OR_NULL,
        endpoint=_TEXT,
        phase={"enum": list(get_args(Phase))},
        stream={"type": "boolean"},
        client_gone={"type": "boolean"},
        priority={"type": "integer"},
        age_s=_SECONDS,
        first_token_s=_SECONDS_OR_NULL,
        prompt_tokens=_COUNT_OR_NULL,
        cached_tokens=_COUNT_OR_NULL,
        choices=_list_of(_CHOICE),
    ),
    "RunningRequestList": _many(reference("RunningRequest")),
    "PartialAnswer": object_of(
        id=_TEXT,
        choices=_list_of(
            object_of(
                index=_COUNT,
                text=_TEXT,
                reasoning=_TEXT,
                tool_calls=_list_of(object_of(name=_TEXT, arguments=_TEXT)),
                finish_reason=_FINISH,
            )
        ),
    ),
    "CancelledRequest": object_of(id=_TEXT, cancelled={"const": True}),
    "StoppedThinking": object_of(id=_TEXT, choices_stopped={"type": "integer", "minimum": 1}),
    "ModelSlots": object_of(
        model=_TEXT,
        inspectable={"type": "boolean", "description": "Whether this engine shows its inside."},
        slots=_COUNT_OR_NULL,
        slots_in_use=_COUNT_OR_NULL,
        requests_waiting=_COUNT_OR_NULL,
        cache_tokens=_COUNT_OR_NULL,
        free_tokens=_COUNT_OR_NULL,
        sequences={**_NULLABLE_LIST, "items": _SEQUENCE},
        prefixes={**_NULLABLE_LIST, "items": _PREFIX},
    ),
    "ModelSlotsList": _many(reference("ModelSlots")),
}
"""Component name to schema."""
