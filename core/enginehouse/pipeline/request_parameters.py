"""Parameters of a request by wire name: list those that it gives, and remove one.

Used when a parameter turns out to be one that the model cannot honour. Does not know models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve

from enginehouse.contract.types import GenerateRequest, ToolUse

__all__ = ["given_parameters", "without_parameter"]

_NAMES = {"num_logprobs": "logprobs"}
"""Sampling fields with another name on the wire."""

_MEMBERS = {
    "suffix": "suffix",
    "prediction": "prediction",
    "compression": "compression",
    "chat_template_kwargs": "template_variables",
    "token_details": "token_details",
}
"""Parameters that are members of a request; an empty value means not given."""

_OFF: Mapping[str, Any] = MappingProxyType({"chat_template_kwargs": {}, "token_details": False})

_THINKING = {"enable_thinking": "enabled", "thinking_budget": "budget", "reasoning_effort": "effort"}
"""Parameters about reasoning, and their field in :class:`enginehouse.contract.types.Thinking`."""


def given_parameters(request: GenerateRequest) -> Iterator[str]:
    """Yield the parameters of a request that some models cannot honour."""
    yield from (_NAMES.get(name, name) for name in (*request.sampling, *request.stopping))
    for fields in request.extensions.values():
        yield from fields
    if request.tool_use is not None and request.tool_use.callable:
        yield "tools"
        yield from _of_tools(request.tool_use)
    yield from _of_chat(request)
    if request.num_choices > 1:
        yield "n"
    if request.prediction is not None:
        yield "prediction"
    if request.compression is not None and request.compression.is_on:
        yield "compression"
    if request.constraint is not None:
        yield _root(request.constraint.param)
    if request.suffix is not None:
        yield "suffix"
    if request.num_prompt_logprobs is not None:
        yield "prompt_logprobs"
    if request.token_details:
        yield "token_details"


def _of_tools(use: ToolUse) -> Iterator[str]:
    if use.choice == "required":
        yield "tool_choice"
    if use.parallel is False:
        yield "parallel_tool_calls"


def _of_chat(request: GenerateRequest) -> Iterator[str]:
    thinking = request.thinking
    if request.template_variables:
        yield "chat_template_kwargs"
    for name, value in (
        ("enable_thinking", thinking.enabled),
        ("thinking_budget", thinking.budget),
        ("reasoning_effort", thinking.effort),
    ):
        if value is not None:
            yield name


def without_parameter(request: GenerateRequest, param: str) -> tuple[GenerateRequest, str] | None:
    """Drop the feature that ``param``, a path in the request's body, asks for; also return the path that was dropped.

    None if it cannot be dropped, as for messages and prompts, without which there is nothing to answer.
    """
    name = _root(param)
    if request.constraint is not None and name == _root(request.constraint.param):
        return evolve(request, constraint=None), _root(request.constraint.param)
    if request.tool_use is not None and name in ("tools", "tool_choice", "parallel_tool_calls"):
        return _without_tools(request, param)
    if name in _MEMBERS and getattr(request, _MEMBERS[name]):
        off: dict[str, Any] = {_MEMBERS[name]: _OFF.get(name)}
        return evolve(request, **off), name
    if name in ("prompt_logprobs", "loglikelihood") and request.num_prompt_logprobs is not None:
        return evolve(request, num_prompt_logprobs=None), name
    if name in _THINKING and getattr(request.thinking, _THINKING[name]) is not None:
        return evolve(request, thinking=evolve(request.thinking, **{_THINKING[name]: None})), name
    return _without_field(request, name)


def _without_tools(request: GenerateRequest, param: str) -> tuple[GenerateRequest, str] | None:
    """Drop the unsupported tool feature: the argument check, the forced call, or the tools themselves."""
    use = request.tool_use
    assert use is not None
    if param.endswith(".strict"):
        lenient = tuple(evolve(tool, strict=False) for tool in use.tools)
        return None if lenient == use.tools else (evolve(request, tool_use=evolve(use, tools=lenient)), param)
    if param == "parallel_tool_calls":
        return (evolve(request, tool_use=evolve(use, parallel=None)), param) if use.parallel is False else None
    if param != "tool_choice":
        return evolve(request, tool_use=None), param
    if use.choice != "auto":
        return evolve(request, tool_use=evolve(use, choice="auto", only=None)), param
    if request.constraint is None:
        return None
    # Tools and an answer format make one constraint, which is named after the tools.
    return evolve(request, constraint=None), _root(request.constraint.param)


def _without_field(request: GenerateRequest, name: str) -> tuple[GenerateRequest, str] | None:
    inside = next((field for field, outside in _NAMES.items() if outside == name), name)
    if inside in request.sampling:
        return evolve(request, sampling=_without(request.sampling, inside)), name
    if inside in request.stopping:
        return evolve(request, stopping=_without(request.stopping, inside)), name
    for plugin, fields in request.extensions.items():
        if name in fields:
            kept = {**request.extensions, plugin: _without(fields, name)}
            # A plugin without fields is not named at all: its engine may not know it.
            return evolve(request, extensions={key: given for key, given in kept.items() if given}), name
    return None


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != name}


def _root(param: str) -> str:
    return param.split(".", 1)[0].split("[", 1)[0]
