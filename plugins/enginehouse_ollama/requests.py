"""Turns the bodies of ``/api/chat`` and ``/api/generate`` into requests."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginehouse.contract.call_arguments import arguments_text
from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest, ModelNotFound
from enginehouse.contract.surface import new_id
from enginehouse.contract.types import (
    Constraint,
    GenerateRequest,
    MediaPart,
    Message,
    Thinking,
    Tool,
    ToolCall,
    ToolUse,
)
from enginehouse_ollama.bodies import ChatBody, GenerateBody, MessageBody, ToolBody

__all__ = ["OPTION_NAMES", "chat_request", "generate_request", "known_name"]

_TAG = ":latest"
_ROLES = ("system", "user", "assistant", "tool")
_OF_FUNCTION = ("index", "name", "arguments")
_ONLY_OF = {"thinking": "assistant", "tool_name": "tool", "tool_call_id": "tool"}
"""Members of messages of one role."""
OPTION_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Request fields to Ollama's names of options; other options have the field's name, or no effect."""
_FIELDS = {option: name for name, option in OPTION_NAMES.items()}
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
_IMAGE_TYPES = {"iVBOR": "png", "/9j/": "jpeg", "R0lG": "gif", "UklG": "webp"}
"""Beginning of an image in base64 to its type."""


def chat_request(call: Call) -> GenerateRequest:
    """Return the request of ``/api/chat``.

    Raises:
        RequestError: the body is invalid.
    """
    body: ChatBody = call.body
    tools = tuple(_tool(tool, f"tools[{index}].function") for index, tool in enumerate(body.tools))
    return _request(
        call, messages=_messages(call), tool_use=ToolUse(tools=tools) if tools else None, thinking=_think(call)
    )


def generate_request(call: Call) -> GenerateRequest:
    """Return the request of ``/api/generate``: a text with ``raw`` or ``suffix``, otherwise a chat of one message.

    Raises:
        RequestError: the body is invalid.
    """
    body: GenerateBody = call.body
    if body.template:
        raise InvalidRequest("template: not supported; use the model's own template, or 'raw'", "template")
    if body.context:
        raise InvalidRequest("context: not supported; send the conversation to /api/chat", "context")
    if body.raw or body.suffix:
        mode = "raw" if body.raw else "suffix"
        for name in ("system", "images"):
            if getattr(body, name):
                raise InvalidRequest(f"{name}: not together with {mode}", name)
        if body.think not in (None, ""):
            call.ignore("think")
        return _request(call, text=body.prompt, suffix=body.suffix or None)
    system = (Message(role="system", content=body.system),) if body.system else ()
    asked = Message(role="user", content=body.prompt, parts=_parts(body.prompt, body.images, "images"))
    return _request(call, messages=(*system, asked), thinking=_think(call))


def known_name(call: Call, name: str) -> str:
    """Return the name by which a model is served, for one that a client wrote with or without a tag.

    Raises:
        InvalidRequest: the name is empty.
        ModelNotFound: the caller has no such model.
    """
    if not name:
        raise InvalidRequest("model: is required", "model")
    try:
        call.server.model(name)
    except ModelNotFound:
        if not name.endswith(_TAG):
            raise
        call.server.model(name.removesuffix(_TAG))
        return name.removesuffix(_TAG)
    return name


def _request(call: Call, **prompt: Any) -> GenerateRequest:
    body = call.body
    name = known_name(call, body.model)
    values = {_FIELDS.get(option, option): value for option, value in _options(call, name).items()}
    read = call.parameters(values, {field: f"options.{OPTION_NAMES.get(field, field)}" for field in values})
    num_logprobs = {"num_logprobs": body.top_logprobs} if body.logprobs else {}
    if body.return_progress and not body.stream:
        call.ignore("return_progress")
    if body.top_logprobs and not body.logprobs:
        call.ignore("top_logprobs")
    return GenerateRequest(
        request_id=new_id("ollama-"),
        model=name,
        sampling={**read.sampling(), **num_logprobs},
        stopping=read.stopping(),
        constraint=_constraint(body.format),
        return_progress=body.return_progress and body.stream,
        **prompt,
    )


def _options(call: Call, model: str) -> dict[str, Any]:
    """Return the options without those that mean "no limit" or "any"; a context that the model has anyway is one."""
    options = {name: value for name, value in call.body.options.items() if value is not None}
    if options.get("seed") == -1:
        del options["seed"]
    limit = options.get("num_predict")
    if isinstance(limit, int) and not isinstance(limit, bool) and limit <= 0:
        del options["num_predict"]
    info = call.server.model(model).info
    num_ctx = options.get("num_ctx")
    if info is not None and isinstance(num_ctx, int) and num_ctx <= info.max_context:
        del options["num_ctx"]
    return options


def _constraint(wanted: Any) -> Constraint | None:
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return Constraint(kind="json_object", param="format")
    if isinstance(wanted, dict):
        return Constraint(kind="json_schema", text=json.dumps(wanted), param="format")
    raise InvalidRequest("format: must be 'json' or a JSON Schema", "format")


def _think(call: Call) -> Thinking:
    """Return the reasoning options. ``false`` changes nothing for models that do not reason."""
    think = call.body.think
    if think is None or think == "":
        return Thinking()
    if not isinstance(think, bool) and (not isinstance(think, str) or think not in _LEVELS):
        levels = ", ".join(map(repr, _LEVELS))
        raise InvalidRequest(f"think: must be true, false or one of {levels}", "think")
    entry = call.server.model(known_name(call, call.body.model))
    if entry.info is not None and not entry.reasons:
        if think:
            raise InvalidRequest(f"think: the model {entry.name!r} does not support thinking", "think")
        return Thinking()
    if isinstance(think, bool):
        return Thinking(enabled=think)
    return Thinking(enabled=True, effort=_LEVELS[think])


def _tool(tool: ToolBody, path: str) -> Tool:
    function = tool.function
    parameters = {"type": "object", "properties": {}, **function.parameters}
    described = {} if function.description is None else {"description": function.description}
    definition = {"name": function.name, **described, "parameters": parameters}
    return Tool(
        name=function.name,
        parameters=parameters,
        definition={"type": "function", "function": definition},
        param=path,
    )


def _messages(call: Call) -> tuple[Message, ...]:
    """Read the messages; results of tools get the ids of the calls that they answer, by name or in order."""
    messages = []
    open_calls = _OpenCalls()
    for index, body in enumerate(call.body.messages):
        path, role = f"messages[{index}]", body.role.lower()
        if role not in _ROLES:
            raise InvalidRequest(f"{path}.role: must be one of {', '.join(_ROLES)}", f"{path}.role")
        calls = tuple(_call(made, index, number, path) for number, made in enumerate(body.tool_calls))
        for name in _unread(body.tool_calls, f"{path}.tool_calls"):
            call.ignore(name)
        if calls and role != "assistant":
            raise InvalidRequest(f"{path}.tool_calls: only the assistant calls tools", f"{path}.tool_calls")
        for made in calls:
            open_calls.add(made)
        for name in [name for name, only in _ONLY_OF.items() if role != only and getattr(body, name)]:
            call.ignore(f"{path}.{name}")
        answered = open_calls.take(body) if role == "tool" else None
        messages.append(
            Message(
                role=role,
                content=body.content,
                name=(body.tool_name or (answered.name if answered else None)) if role == "tool" else None,
                parts=_parts(body.content, body.images, f"{path}.images"),
                reasoning=body.thinking if role == "assistant" else None,
                tool_calls=calls,
                tool_call_id=(body.tool_call_id or (answered.id if answered else None)) if role == "tool" else None,
                param=path,
            )
        )
    return tuple(messages)


class _OpenCalls:
    """Calls without a result, found by id or name in a time that does not depend on their number."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}
        self._numbers: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._num_calls = 0

    def add(self, call: ToolCall) -> None:
        """Add a call."""
        self._calls[self._num_calls] = call
        for key in (("", ""), ("name", call.name), ("id", call.id)):
            self._numbers[key].append(self._num_calls)
        self._num_calls += 1

    def take(self, body: MessageBody) -> ToolCall | None:
        """Remove the first call that a result answers: of its id, else of its name, else of any; None without one."""
        kinds = {"id": body.tool_call_id, "name": body.tool_name}
        key = next(((kind, value) for kind, value in kinds.items() if value is not None), ("", ""))
        waiting = self._numbers.get(key, deque())
        while waiting:
            call = self._calls.pop(waiting.popleft(), None)
            if call is not None:
                return call
        return None


def _call(call: Mapping[str, Any], message: int, number: int, path: str) -> ToolCall:
    where = f"{path}.tool_calls[{number}].function"
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}: must be an object with a name", where)
    arguments = arguments_text(function.get("arguments"), f"{where}.arguments")
    call_id = call.get("id") or f"call_{message}_{number}"
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{path}.tool_calls[{number}].id: must be a string", f"{path}.tool_calls[{number}].id")
    return ToolCall(id=call_id, name=function["name"], arguments=arguments)


def _unread(calls: Sequence[Mapping[str, Any]], path: str) -> Iterator[str]:
    """Yield paths of members that nothing reads."""
    for number, call in enumerate(calls):
        where = f"{path}[{number}]"
        yield from (f"{where}.{name}" for name in call if name not in ("id", "type", "function"))
        yield from (f"{where}.function.{name}" for name in call["function"] if name not in _OF_FUNCTION)


def _parts(content: str, images: Sequence[str], path: str) -> tuple[str | MediaPart, ...]:
    """Return the content and its images in the form of OpenAI's API, which core reads; nothing without images."""
    if not images:
        return ()
    media = [_image(image, f"{path}[{index}]") for index, image in enumerate(images)]
    return (*((content,) if content else ()), *media)


def _image(image: str, path: str) -> MediaPart:
    kind = next((kind for magic, kind in _IMAGE_TYPES.items() if image.startswith(magic)), None)
    if kind is None:
        raise InvalidRequest(f"{path}: must be a PNG, JPEG, GIF or WebP image in base64", path)
    return MediaPart(kind="image_url", value={"url": f"data:image/{kind};base64,{image}"}, param=path)
