"""Names of request fields: the ones that core owns, and the ones that plugins declare.

A sampler plugin declares its fields as the attributes of an attrs class. A name has only one meaning, whatever is
installed, so a name collision refuses the sampler at start.
"""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

__all__ = ["CORE_FIELDS", "RequestField", "fields_of"]

CORE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "audio",
        "best_of",
        "cache_prompt",
        "cache_salt",
        "chat_template_kwargs",
        "compression",
        "continue_final_message",
        "echo",
        "enable_thinking",
        "frequency_penalty",
        "function_call",
        "functions",
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "input",
        "json_schema",
        "log_prompt",
        "logit_bias",
        "loglikelihood",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "modalities",
        "model",
        "n",
        "parallel_tool_calls",
        "peft",
        "prediction",
        "presence_penalty",
        "priority",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prompt_logprobs",
        "reasoning_effort",
        "repetition_penalty",
        "response_format",
        "safety_identifier",
        "samplers",
        "seed",
        "service_tier",
        "stop",
        "stop_token_ids",
        "store",
        "stream",
        "stream_options",
        "structured_outputs",
        "suffix",
        "temperature",
        "thinking_budget",
        "token_details",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    }
)
"""Request fields of core's endpoints, including planned ones; plugins cannot redefine them."""


@frozen
class RequestField:
    """A request field that a plugin declared.

    Attributes:
        name: the field in the request body.
        sampler: name of the sampler that uses it; the key of its fields in ``GenerateRequest.extensions``.
        plugin: name of the plugin that registered the sampler.
        attribute: its type, default and validator.
    """

    name: str
    sampler: str
    plugin: str
    attribute: attrs.Attribute[Any]


def fields_of(fields_class: type[Any], sampler: str, plugin: str) -> list[RequestField]:
    """Return the request fields that ``fields_class`` declares.

    Raises:
        ValueError: it is not an attrs class, or an attribute has no default (the default means "off").
    """
    if not attrs.has(fields_class):
        raise ValueError("request_fields must be an attrs class")
    attrs.resolve_types(fields_class)
    declared = [
        RequestField(name=attribute.name, sampler=sampler, plugin=plugin, attribute=attribute)
        for attribute in attrs.fields(fields_class)
    ]
    for declaration in declared:
        if declaration.attribute.default is attrs.NOTHING:
            raise ValueError(f"the request field {declaration.name!r} needs a default that means off")
    return declared
