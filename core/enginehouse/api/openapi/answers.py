"""Schemas of responses, stream chunks and errors. Written by hand; tests check them against the server."""

from __future__ import annotations

from typing import get_args

from enginehouse.contract.rows import JsonSchema
from enginehouse.contract.timings import usage_times
from enginehouse.contract.usage import USAGE_FIELDS, Usage
from enginehouse.pipeline.capabilities import Support
from enginehouse.pipeline.parameters import Origin
from enginehouse.serving import ModelState


def object_of(optional: dict[str, JsonSchema] | None = None, /, **members: JsonSchema) -> JsonSchema:
    """Return an object schema: ``members`` are required, ``optional`` ones are not."""
    return {"type": "object", "properties": {**members, **(optional or {})}, "required": list(members)}


def reference(name: str) -> JsonSchema:
    """Return a reference to the component of that name."""
    return {"$ref": f"#/components/schemas/{name}"}


def _usage_group(group: str) -> JsonSchema:
    return object_of(**{name: _COUNT for name, shown in USAGE_FIELDS.items() if shown.group == group})


def _list_of(items: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": items}


def _nullable(schema: JsonSchema) -> JsonSchema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> JsonSchema:
    return {"const": value}


_TEXT: JsonSchema = {"type": "string"}
_TEXT_OR_NULL: JsonSchema = {"type": ["string", "null"]}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_TOKEN_OR_IMAGE: JsonSchema = {"type": "integer", "description": "A token id; of an image, a negative number."}
_NUMBER: JsonSchema = {"type": "number", "minimum": 0}
_RANGE: JsonSchema = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_LOGPROB: JsonSchema = {"type": "number", "maximum": 0}
_BYTES: JsonSchema = _list_of({"type": "integer", "minimum": 0, "maximum": 255})
_TIME: JsonSchema = {"type": "integer", "description": "Unix time in seconds."}
_FINISH: JsonSchema = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
_FINISH_OR_NULL: JsonSchema = {"enum": ["stop", "length", "tool_calls", "content_filter", None]}

_CHAT_TOKEN = {"token": _TEXT, "logprob": _LOGPROB, "bytes": _BYTES}
_TOKEN_DETAILS = {
    "forced": {"type": "boolean"},
    "drafted_by": _TEXT_OR_NULL,
    "exit_layer": {"type": ["integer", "null"], "minimum": 1},
    "resumed": {"type": "boolean"},
}
_HEAD = {"id": _TEXT, "created": _TIME, "model": _TEXT, "system_fingerprint": _TEXT}
_REASONING = {"reasoning_content": _TEXT_OR_NULL, "reasoning": _TEXT_OR_NULL}

_CALL = object_of(id=_TEXT, type=_const("function"), function=object_of(name=_TEXT, arguments=_TEXT))
_CALL_DELTA = object_of(
    {"id": _TEXT, "type": _const("function")},
    index=_COUNT,
    function=object_of({"name": _TEXT}, arguments=_TEXT),
)
_MESSAGE = object_of(
    {**_REASONING, "tool_calls": _list_of(_CALL)},
    role=_const("assistant"),
    content=_TEXT_OR_NULL,
    refusal=_TEXT_OR_NULL,
)
_DELTA = object_of({"role": _const("assistant"), "content": _TEXT, **_REASONING, "tool_calls": _list_of(_CALL_DELTA)})
_VALUE = object_of({"value": {}}, origin={"enum": list(get_args(Origin))})
_DETAILS = {"enginehouse": reference("Details")}
_POOLING = object_of(
    max_tokens=_COUNT,
    dimensions=_COUNT,
    pooling=_TEXT,
    is_normalized={"type": "boolean"},
    dimension_choices=_list_of(_COUNT),
    prompts={"type": "object", "additionalProperties": _TEXT},
    default_prompt=_TEXT,
    labels=_list_of(_TEXT),
    activation={"enum": ["none", "sigmoid", "softmax"]},
)
_MODEL_DETAILS = {
    "pooling": _nullable(_POOLING),
    "quantization": _TEXT_OR_NULL,
    "template_hash": _TEXT_OR_NULL,
    "system_fingerprint": _TEXT_OR_NULL,
    "parsers": _nullable(object_of(tools=_TEXT_OR_NULL, reasoning=_TEXT_OR_NULL)),
    "parameters": {"type": ["object", "null"], "additionalProperties": _VALUE},
    "capabilities": {
        "type": ["object", "null"],
        "additionalProperties": object_of(support={"enum": list(get_args(Support))}, reason=_TEXT),
    },
    "metadata": {"type": ["object", "null"], "additionalProperties": _TEXT},
    "media": {"type": ["array", "null"], "items": _TEXT},
    "input_modalities": {"type": ["array", "null"], "items": _TEXT},
}
_TIMINGS = {"timings": {"type": "object", "additionalProperties": _NUMBER}}
_HEADERS = {"headers": {"type": "object", "additionalProperties": _TEXT}}
_TOKEN_IDS = {"token_ids": _list_of(_COUNT)}
_PROMPT_TOKEN_IDS = {"prompt_token_ids": _list_of(_TOKEN_OR_IMAGE)}
_PROGRESS = {"prompt_progress": object_of(total=_COUNT, cache=_COUNT, processed=_COUNT, time_ms=_COUNT)}
_OF_CHUNKS = {**_DETAILS, **_TIMINGS, **_HEADERS, **_PROGRESS}
_SCORES = {
    "prompt_logprobs": _list_of(
        {
            "type": ["object", "null"],
            "additionalProperties": object_of(
                logprob=_LOGPROB, rank={"type": ["integer", "null"], "minimum": 1}, decoded_token=_TEXT
            ),
        }
    ),
    "loglikelihood": object_of(content=_list_of(reference("ChatToken"))),
}
_MODEL_STATE: JsonSchema = {"enum": list(get_args(ModelState))}

ANSWER_SCHEMAS: dict[str, JsonSchema] = {
    "Usage": object_of(
        dict.fromkeys(usage_times(Usage()), _NUMBER),
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_usage_group("prompt_tokens_details"),
        completion_tokens_details=_usage_group("completion_tokens_details"),
    ),
    "Details": object_of(
        model=_TEXT,
        routed=_nullable(
            object_of(
                {
                    "strategy": _TEXT,
                    "reason": _TEXT,
                    "decision_ms": {"type": "number", "minimum": 0},
                    "tried": _list_of(object_of(model=_TEXT, reason=_TEXT)),
                    "discarded_tokens": _COUNT,
                },
                replica=_nullable(
                    object_of(
                        name=_TEXT, reason=_TEXT, matched={"type": "number", "minimum": 0, "maximum": 1}, tried=_COUNT
                    )
                ),
            )
        ),
        backend=_TEXT,
        parameters={"type": "object", "additionalProperties": _VALUE},
        timings_ms={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
        tokens_per_second={"type": "object", "additionalProperties": {"type": ["number", "null"]}},
        optimizations={"type": "object", "additionalProperties": _COUNT},
        drafters={
            "type": "object",
            "additionalProperties": object_of(drafted_tokens=_COUNT, accepted_draft_tokens=_COUNT),
        },
        prefix_cache=object_of(
            loaded_tokens=_COUNT,
            first_difference=_nullable(object_of({"expected": _TEXT_OR_NULL}, index=_COUNT, got=_TEXT)),
        ),
        unsupported=_list_of(_TEXT),
        ignored=_list_of(_TEXT),
    ),
    "ChatToken": object_of(_TOKEN_DETAILS, **_CHAT_TOKEN, top_logprobs=_list_of(object_of(**_CHAT_TOKEN))),
    "ChatLogprobs": object_of(content=_list_of(reference("ChatToken")), refusal={"type": "null"}),
    "CompletionLogprobs": object_of(
        {"token_details": _list_of(_nullable(object_of(**_TOKEN_DETAILS)))},
        tokens=_list_of(_TEXT),
        token_logprobs=_list_of({"type": ["number", "null"], "maximum": 0}),
        top_logprobs=_list_of({"type": ["object", "null"], "additionalProperties": _LOGPROB}),
        text_offset=_list_of(_COUNT),
    ),
    "ChatCompletion": object_of(
        {**_SCORES, **_DETAILS, **_TIMINGS, **_PROMPT_TOKEN_IDS},
        **_HEAD,
        object=_const("chat.completion"),
        choices=_list_of(
            object_of(
                _TOKEN_IDS,
                index=_COUNT,
                message=_MESSAGE,
                logprobs=_nullable(reference("ChatLogprobs")),
                finish_reason=_FINISH,
            )
        ),
        usage=reference("Usage"),
    ),
    "ChatCompletionChunk": object_of(
        {"usage": _nullable(reference("Usage")), **_SCORES, **_OF_CHUNKS, **_PROMPT_TOKEN_IDS},
        **_HEAD,
        object=_const("chat.completion.chunk"),
        choices=_list_of(
            object_of(
                _TOKEN_IDS,
                index=_COUNT,
                delta=_DELTA,
                logprobs=_nullable(reference("ChatLogprobs")),
                finish_reason=_FINISH_OR_NULL,
            )
        ),
    ),
    "Completion": object_of(
        {**_DETAILS, **_TIMINGS},
        **_HEAD,
        object=_const("text_completion"),
        choices=_list_of(
            object_of(
                {**_SCORES, **_TOKEN_IDS, **_PROMPT_TOKEN_IDS},
                index=_COUNT,
                text=_TEXT,
                logprobs=_nullable(reference("CompletionLogprobs")),
                finish_reason=_FINISH,
            )
        ),
        usage=reference("Usage"),
    ),
    "CompletionChunk": object_of(
        {"usage": _nullable(reference("Usage")), **_OF_CHUNKS},
        **_HEAD,
        object=_const("text_completion"),
        choices=_list_of(
            object_of(
                {**_SCORES, **_TOKEN_IDS, **_PROMPT_TOKEN_IDS},
                index=_COUNT,
                text=_TEXT,
                logprobs=_nullable(reference("CompletionLogprobs")),
                finish_reason=_FINISH_OR_NULL,
            )
        ),
    ),
    "Model": object_of(
        _MODEL_DETAILS,
        id=_TEXT,
        object=_const("model"),
        created=_TIME,
        owned_by=_TEXT,
        aliases=_list_of(_TEXT),
        state=_MODEL_STATE,
        progress={"type": "number", "minimum": 0, "maximum": 1},
        error=_TEXT_OR_NULL,
        backend=_TEXT_OR_NULL,
        max_context={"type": ["integer", "null"]},
        task={"enum": ["generate", "embed", "rerank", "classify", None]},
        num_restarts=_COUNT,
        parent=_TEXT_OR_NULL,
    ),
    "ModelList": object_of(object=_const("list"), data=_list_of(reference("Model"))),
    "Tokens": object_of(
        {
            "token_strs": _list_of(_TEXT),
            "chunks": _list_of(object_of(type={"enum": ["image", "audio"]}, start=_COUNT, count=_COUNT)),
            "details": object_of(
                cached_tokens=_nullable(_COUNT),
                segments=_list_of(object_of(text=_TEXT, trusted={"type": "boolean"})),
            ),
        },
        tokens=_list_of(
            {
                "anyOf": [
                    _TOKEN_OR_IMAGE,
                    object_of(id=_TOKEN_OR_IMAGE, piece={"anyOf": [_TEXT, _BYTES]}),
                ]
            }
        ),
        count=_COUNT,
        max_model_len=_COUNT,
    ),
    "DetokenizedText": object_of(content=_TEXT, prompt=_TEXT),
    "InputTokens": object_of(input_tokens=_COUNT),
    "RenderedPrompt": object_of(prompt=_TEXT),
    "Route": object_of(
        object=_const("route"),
        asked=_TEXT_OR_NULL,
        model=_TEXT,
        attempts=_list_of(_TEXT),
        strategy=_TEXT_OR_NULL,
        reason=_TEXT,
        candidates=_list_of(
            object_of(
                {
                    "score": {"type": ["number", "null"]},
                    "state": {"enum": list(get_args(ModelState))},
                    "has_failed": {"type": "boolean"},
                    "num_running": _COUNT,
                    "num_waiting": _COUNT,
                    "first_token_ms": {"type": ["number", "null"], "minimum": 0},
                },
                model=_TEXT,
                refused=_TEXT_OR_NULL,
            )
        ),
        features={"type": "object", "additionalProperties": {"type": "number"}},
        decision_ms={"type": "number", "minimum": 0},
    ),
    "Compression": object_of(
        {
            "messages": _list_of(object_of(role=_TEXT, content=_TEXT, is_shortened={"type": "boolean"})),
            "prompt": _TEXT,
        },
        object=_const("compression"),
        model=_TEXT,
        compression={"type": ["object", "null"], "description": "As in the details of a response."},
        texts=_list_of(
            object_of(
                message={"type": ["integer", "null"], "description": "Index of the message; null for a prompt."},
                kept=_list_of(_RANGE),
                parts=_list_of(
                    object_of(
                        start=_COUNT,
                        end=_COUNT,
                        kept={"type": "boolean"},
                        score={"type": ["number", "null"]},
                        reason=_TEXT,
                    )
                ),
            )
        ),
    ),
    "Health": object_of(
        status={"enum": ["ok", "degraded", "loading", "restarting", "failed", "stopping"]},
        models={
            "type": "object",
            "additionalProperties": object_of(
                state=_MODEL_STATE, progress={"type": "number", "minimum": 0, "maximum": 1}
            ),
        },
    ),
    "Error": object_of(error=object_of(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT)),
}
"""Component name to schema."""
