"""Turns the bodies of ``/completion`` and ``/infill`` into requests."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.contract.adapter_fields import find_ignored_in_lora, read_adapters
from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.surface import new_id
from enginehouse.contract.types import Constraint, GenerateRequest
from enginehouse_llama_server.bodies import InfillBody

__all__ = ["FIELD_NAMES", "completion_requests", "has_many", "infill_requests", "read_prompts"]

FIELD_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "n_predict"}
"""Request fields to llama-server's names of them; others have the same name."""

_PARAMETERS = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_last_n", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "stop_regex", "ignore_eos", "samplers", "post_sampling_probs"),
)
_ANY_SEEDS = (-1, 2**32 - 1)
_MAX_PROBS = 100


async def completion_requests(call: Call) -> list[GenerateRequest]:
    """Return the requests of ``/completion``, one per prompt.

    Raises:
        RequestError: the body is invalid.
    """
    return await _requests(call, await read_prompts(call))


async def read_prompts(call: Call) -> list[dict[str, Any]]:
    """Return each prompt as arguments of a request: its text, or its token ids.

    Raises:
        InvalidRequest: a prompt is invalid.
    """
    asked = call.body.prompt
    prompts = asked if has_many(asked) else [asked]
    if not prompts:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if len(prompts) > (most := call.server.max_prompts):
        raise InvalidRequest(f"prompt: at most {most} prompts are allowed, not {len(prompts)}", "prompt")
    return [await _prompt(call, prompt, is_one_of_many=len(prompts) > 1) for prompt in prompts]


async def infill_requests(call: Call) -> list[GenerateRequest]:
    """Return the request of ``/infill``: other files and the beginning come before the gap."""
    body: InfillBody = call.body
    extra = "".join(f"{file.filename or 'tmp'}\n{file.text}\n" for file in body.input_extra)
    before = f"{extra}{body.input_prefix}{body.prompt}"
    return await _requests(call, [{"text": before, "suffix": body.input_suffix}])


def has_many(prompt: Any) -> bool:
    """Return True for a list of prompts: one that has no token ids itself."""
    return isinstance(prompt, list) and not any(_is_id(item) for item in prompt)


async def _prompt(call: Call, prompt: Any, *, is_one_of_many: bool) -> dict[str, Any]:
    """Return a prompt as arguments of a request. Texts among several prompts are tokenized, for their counts."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise InvalidRequest("prompt.multimodal_data: not supported; send images to /v1/chat/completions", "prompt")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        if not is_one_of_many:
            return {"text": prompt}
        return {"token_ids": tuple(await call.server.tokenize(prompt, call.body.model, add_special=True))}
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt: must be a string, token ids, or a list of these", "prompt")
    token_ids: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, str):
            token_ids += await call.server.tokenize(part, call.body.model, add_special=index == 0)
        elif _is_id(part) and part >= 0:
            token_ids.append(part)
        else:
            raise InvalidRequest(f"prompt[{index}]: must be a token id or a string", f"prompt[{index}]")
    return {"token_ids": tuple(token_ids)}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def _requests(call: Call, prompts: list[dict[str, Any]]) -> list[GenerateRequest]:
    body = call.body
    param, adapters = read_adapters({"lora": body.lora})
    for path in find_ignored_in_lora(body.lora):
        call.ignore(path)
    values = {name: getattr(body, name) for name in _PARAMETERS if getattr(body, name) is not None}
    if body.repeat_penalty is not None:
        values["repetition_penalty"] = body.repeat_penalty
    if values.get("seed") in _ANY_SEEDS:
        del values["seed"]
    if body.logit_bias:
        values["logit_bias"] = await _biases(call)
    limit = _first_of(call, "n_predict", "max_completion_tokens", "max_tokens")
    limit = -1 if limit is None else limit
    if limit > 0:
        values["max_tokens"] = limit
    elif limit < -1:
        raise InvalidRequest(f"n_predict: must be -1 (no limit) or at least 0, not {limit}", "n_predict")
    read = call.parameters(values, {name: FIELD_NAMES.get(name, name) for name in values})
    stopping = {**read.stopping(), **({"max_tokens": 0} if limit == 0 else {})}
    if body.return_progress and not body.stream:
        call.ignore("return_progress")
    num_probs, first_id = _num_probs(call), new_id("cmpl-")
    return [
        GenerateRequest(
            request_id=first_id if number == 0 else f"{first_id}-{number}",
            model=body.model,
            adapters=adapters,
            adapters_param=param,
            num_choices=_num_choices(call),
            sampling={**read.sampling(), **({"num_logprobs": num_probs} if num_probs else {})},
            stopping=stopping,
            constraint=_constraint(call),
            cache_prompt=body.cache_prompt,
            return_progress=body.return_progress and body.stream,
            **prompt,
        )
        for number, prompt in enumerate(prompts)
    ]


def _first_of(call: Call, *names: str) -> int | None:
    """Return the first given member of several names of one; others with another value are listed as ignored."""
    given = {name: value for name in names if (value := getattr(call.body, name)) is not None}
    first = next(iter(given.values()), None)
    for name in [name for name, value in given.items() if value != first]:
        call.ignore(name)
    return first


def _num_choices(call: Call) -> int:
    found = _first_of(call, "n_cmpl", "n")
    found = 1 if found is None else found
    most = call.server.max_choices
    if not 1 <= found <= most:
        raise InvalidRequest(f"n_cmpl: must be from 1 to {most}, not {found}", "n_cmpl")
    return found


def _num_probs(call: Call) -> int:
    found = _first_of(call, "n_probs", "logprobs") or 0
    if not 0 <= found <= _MAX_PROBS:
        raise InvalidRequest(f"n_probs: must be from 0 to {_MAX_PROBS}, not {found}", "n_probs")
    return found


async def _biases(call: Call) -> dict[str, float]:
    """Return the biases by token id. A text applies to each of its tokens, ``false`` bans."""
    given = call.body.logit_bias
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest("logit_bias: must be an object, or a list of pairs of token and bias", "logit_bias")
    biases: dict[str, float] = {}
    for token, bias in pairs:
        value = -100.0 if bias is False else bias
        if isinstance(token, str) and not token.isdecimal():
            found = await call.server.tokenize(token, call.body.model)
            biases |= {str(token_id): value for token_id in found}
        else:
            biases[str(token)] = value
    return biases


def _constraint(call: Call) -> Constraint | None:
    body = call.body
    if body.json_schema is not None and body.grammar:
        call.ignore("json_schema")
    elif body.json_schema is not None:
        if not isinstance(body.json_schema, dict):
            raise InvalidRequest("json_schema: must be an object", "json_schema")
        if not body.json_schema:
            return Constraint(kind="json_object", param="json_schema")
        return Constraint(kind="json_schema", text=json.dumps(body.json_schema), param="json_schema")
    return Constraint(kind="gbnf", text=body.grammar, param="grammar") if body.grammar else None
