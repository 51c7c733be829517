"""Converts an engine's request to the body of a request to a server.

All sampling and stop parameters are written explicitly, including defaults, so that the values this server reports for
a request do not depend on the defaults of another server.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import (
    Chat,
    Constraint,
    EngineRequest,
    Image,
    MediaPart,
    Message,
    SamplingParams,
    Thinking,
    Tool,
    ToolCall,
    ToolUse,
)
from enginehouse_remote.kinds import KindOfServer

__all__ = ["Body", "body_of", "routing_parts"]

_OFF = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
"""Parameter values that have no effect, so servers need not support them."""

_BEFORE_MESSAGES = ("tools", "chat_template_kwargs", "enable_thinking", "reasoning_effort")
"""Members of a body that templates may render at the beginning of a prompt."""

_LOWEST_TOP_P = 1e-9
"""Replaces 0, which some servers refuse; the most probable token always has a higher probability than this."""


@frozen
class Body:
    """A request body and its path, relative to the server's base URL.

    Attributes:
        adapters: names of the adapters in it, for messages.
    """

    path: str
    data: dict[str, Any]
    adapters: str = ""


def body_of(request: EngineRequest, model: str, kind: KindOfServer) -> Body:
    """Return the request as a streamed request body for ``kind``.

    Raises:
        UnsupportedParameter: the request uses a parameter that this kind of server does not support; names it.
    """
    data: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    data |= _adapters(request.adapters, model, kind)
    names = ", ".join(one.path for one in request.adapters)
    data |= _parameters(request, kind)
    if request.constraint is not None:
        data |= _constraint(request.constraint, kind)
    logprobs = request.sampling.num_logprobs
    if request.chat is None:
        if logprobs is not None:
            data["logprobs"] = max(logprobs, kind.min_top_logprobs)
        return Body("/completions", data | {"prompt": _prompt(request)}, names)
    if logprobs is not None:
        data |= {"logprobs": True, "top_logprobs": max(logprobs, kind.min_top_logprobs)}
    return Body("/chat/completions", data | _chat(request.chat, kind), names)


def routing_parts(data: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the prompt of a request body in the order in which templates render it, one part per message.

    Two requests have the same first parts as far as their prompts are the same; sampling parameters are left out.
    """
    yield msgspec.json.encode([data.get(name) for name in _BEFORE_MESSAGES])
    for message in data.get("messages", ()):
        yield msgspec.json.encode(message)
    yield msgspec.json.encode(data.get("prompt"))


def _adapters(adapters: Sequence[Adapter], model: str, kind: KindOfServer) -> dict[str, Any]:
    """Name adapters as the server does: each ``path`` is its name there, with or without ``model:``."""
    if not adapters:
        return {}
    if kind.adapters == "field":
        return {"adapters": {one.path.removeprefix(f"{model}:"): one.scale for one in adapters}}
    if kind.adapters is None:
        raise UnsupportedParameter("adapters: the remote server takes none", "adapters")
    if len(adapters) > 1 or adapters[0].scale != 1:
        message = "adapters: the remote server takes one adapter, with the scale 1"
        raise UnsupportedParameter(message, "adapters")
    return {"model": adapters[0].path}


def _parameters(request: EngineRequest, kind: KindOfServer) -> dict[str, Any]:
    values = _values(request)
    for name, value in values.items():
        # Every request has a seed; one set by a client has already been refused here.
        is_asked = value is not None and value != _OFF.get(name) and name != "seed"
        if is_asked and name not in kind.parameters:
            raise UnsupportedParameter(f"{name}: the remote server does not honour it", name)
    honoured = {name: value for name, value in values.items() if value is not None and name in kind.parameters}
    if "top_k" in honoured:
        honoured["top_k"] = honoured["top_k"] or kind.off.get("top_k", 0)
    return {kind.names.get(name, name): value for name, value in honoured.items()}


def _values(request: EngineRequest) -> dict[str, Any]:
    """All sampling and stop parameters, by the names that clients use; None means not set."""
    sampling, stopping = request.sampling, request.stopping
    values: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": max(sampling.top_p, _LOWEST_TOP_P),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "post_sampling_probs": sampling.post_sampling_probs or None,
        "seed": sampling.seed,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None,
        "samplers": sampling.samplers,
        "stop": stopping.stop or None,
        "stop_regex": stopping.stop_regex or None,
        "stop_token_ids": stopping.stop_token_ids or None,
        "max_tokens": stopping.max_tokens,
        "min_tokens": stopping.min_tokens or None,
        "ignore_eos": stopping.ignore_eos or None,
        "n": request.num_choices if request.num_choices > 1 else None,
    }
    for fields in sampling.extensions.values():
        values |= fields
    return values


def _prompt(request: EngineRequest) -> str | list[int]:
    if request.token_ids is not None:
        return list(request.token_ids)
    return "".join(segment.text for segment in request.segments)


def _chat(chat: Chat, kind: KindOfServer) -> dict[str, Any]:
    data: dict[str, Any] = {"messages": [_message(message) for message in chat.messages]}
    variables = dict(chat.template_variables)
    if chat.thinking is not None:
        data |= _thinking(chat.thinking, kind, variables)
    if variables:
        data["chat_template_kwargs"] = variables
    if chat.tool_use is not None:
        data |= _tools(chat.tool_use)
    return data


def _message(message: Message) -> dict[str, Any]:
    content = [_part(part) for part in message.parts] if message.parts else message.content
    data: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        data["name"] = message.name
    if message.reasoning is not None:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    return data


def _part(part: str | Image | MediaPart) -> dict[str, Any]:
    """Convert a part of a message. Images are sent as bytes: no server is asked to fetch a client's URL."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    assert isinstance(part, Image)
    link = {"url": f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"}
    return {"type": "image_url", "image_url": link | ({} if part.detail is None else {"detail": part.detail})}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _thinking(thinking: Thinking, kind: KindOfServer, variables: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if thinking.enabled is not None:
        if kind.switch:
            data["enable_thinking"] = thinking.enabled
        else:
            variables["enable_thinking"] = thinking.enabled
    if thinking.effort is not None:
        data["reasoning_effort"] = thinking.effort
    if thinking.budget is not None:
        data["thinking_budget"] = thinking.budget
    return data


def _tools(use: ToolUse) -> dict[str, Any]:
    choice: Any = use.choice
    if use.only is not None:
        choice = {"type": "function", "function": {"name": use.only}}
    # Not every server supports the choice `allowed_tools`; omitting the other tools has the same effect.
    tools = use.tools if use.allowed is None else use.callable
    data: dict[str, Any] = {"tools": [_tool(tool) for tool in tools], "tool_choice": choice}
    parallel = use.parallel if use.only is None else False
    if parallel is not None:
        data["parallel_tool_calls"] = parallel
    return data


def _tool(tool: Tool) -> dict[str, Any]:
    """Return the client's own definition; the one shown to templates does not say that calls are validated."""
    if not tool.strict:
        return tool.definition
    return {**tool.definition, "function": {**tool.definition["function"], "strict": True}}


def _constraint(constraint: Constraint, kind: KindOfServer) -> dict[str, Any]:
    if constraint.kind not in kind.constraints:
        raise UnsupportedParameter(
            f"{constraint.param}: the remote server does not enforce {constraint.kind}", constraint.param
        )
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if constraint.kind == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": json.loads(constraint.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    field = kind.constraint_fields.get(constraint.kind)
    if field is not None:
        return {field: constraint.text}
    if constraint.kind == "choice":
        return {"structured_outputs": {"choice": json.loads(constraint.text)}}
    return {"structured_outputs": {"regex" if constraint.kind == "regex" else "grammar": constraint.text}}
