"""Converts tools, tool choice and reasoning fields to values of :mod:`enginehouse.contract.types`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import msgspec

from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.shapes import Effort, FunctionBody, ToolBody
from enginehouse.contract.types import Thinking, Tool, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)  # OpenAI's and dots, which MCP servers use in tool names


def read_tool_use(tools: Sequence[ToolBody], choice: Any, parallel: bool | None) -> ToolUse | None:
    """Return the tools and their permitted use; None without tools.

    Raises:
        InvalidRequest: a tool is malformed, or the choice does not fit the tools.
    """
    mode, allowed = _read_choice(choice)
    if not tools:
        if mode == "required":
            raise InvalidRequest("tool_choice: a call is required, but tools is empty or missing", "tool_choice")
        if allowed is not None:
            path, name = allowed[0]
            raise InvalidRequest(f"{path}: no tool has the name {quoted(name)}", path)
        return None
    read = tuple(_read_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            path = f"tools[{index}].function.name"
            raise InvalidRequest(f"{path}: another tool has the name {tool.name!r} already", path)
        seen.add(tool.name)
    for path, name in allowed or ():
        if name not in seen:
            raise InvalidRequest(f"{path}: no tool has the name {quoted(name)}", path)
    if allowed is not None and choice.get("type") == "function":
        return ToolUse(tools=read, choice=mode, only=allowed[0][1], parallel=parallel)
    names = None if allowed is None else frozenset(name for _, name in allowed)
    return ToolUse(tools=read, choice=mode, allowed=names, parallel=parallel)


def find_ignored_in_tools(tools: Any) -> Iterator[str]:
    """Yield paths of unknown fields."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, Mapping):
            yield from _unknown(tool, ToolBody, f"tools[{index}]")
            function = tool.get("function")
            if isinstance(function, Mapping):
                yield from _unknown(function, FunctionBody, f"tools[{index}].function")


def find_ignored_in_choice(choice: Any) -> Iterator[str]:
    """Yield paths of unknown fields in ``tool_choice``."""
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        yield from (f"tool_choice.{name}" for name in choice if name not in ("type", kind))
        if kind == "function":
            yield from _ignored_in_function(choice, "tool_choice")
        inner = choice.get("allowed_tools") if kind == "allowed_tools" else None
        if isinstance(inner, Mapping):
            path = "tool_choice.allowed_tools"
            yield from (f"{path}.{name}" for name in inner if name not in ("mode", "tools"))
            tools = inner.get("tools")
            for index, tool in enumerate(tools if isinstance(tools, list) else ()):
                if isinstance(tool, Mapping):
                    where = f"{path}.tools[{index}]"
                    yield from (f"{where}.{name}" for name in tool if name not in ("type", "function"))
                    yield from _ignored_in_function(tool, where)


def _ignored_in_function(data: Mapping[str, Any], path: str) -> Iterator[str]:
    function = data.get("function")
    if isinstance(function, Mapping):
        yield from (f"{path}.function.{name}" for name in function if name != "name")


def _unknown(data: Mapping[str, Any], body: type[Any], path: str) -> Iterator[str]:
    known = {attribute.name for attribute in attrs.fields(body)}
    return (f"{path}.{name}" for name in data if name not in known)


def _read_tool(function: FunctionBody, path: str) -> Tool:
    if _NAME.fullmatch(function.name) is None:
        message = "must have 1 to 64 letters, digits, underscores, hyphens and dots"
        raise InvalidRequest(f"{path}.name: {message}", f"{path}.name")
    parameters = function.parameters or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.parameters.type: must be 'object'", f"{path}.parameters.type")
    described = {} if function.description is None else {"description": function.description}
    definition = {"name": function.name, **described, "parameters": parameters}
    return Tool(
        name=function.name,
        parameters=parameters,
        definition={"type": "function", "function": definition},
        strict=bool(function.strict),
        param=path,
    )


_Mode = Literal["auto", "none", "required"]
_Named = tuple[tuple[str, str], ...]
"""Functions that may be called, each after the path of its name in the request."""


def _read_choice(choice: Any) -> tuple[_Mode, _Named | None]:
    """Return the mode and the only functions that may be called; None means all."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if not isinstance(choice, dict):
        raise InvalidRequest(
            f"tool_choice: must be 'none', 'auto', 'required', or an object, not {quoted(choice)}", "tool_choice"
        )
    if choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), "tool_choice.allowed_tools")
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type: must be 'function' or 'allowed_tools'", "tool_choice.type")
    return "required", (_read_named(choice, "tool_choice"),)


def _read_allowed(allowed: Any, path: str) -> tuple[_Mode, _Named]:
    """Read the member ``allowed_tools``, named like the type."""
    if not isinstance(allowed, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode: must be 'auto' or 'required'", f"{path}.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"{path}.tools: must be a list of at least one tool", f"{path}.tools")
    named = []
    for index, tool in enumerate(tools):
        where = f"{path}.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequest(f"{where}.type: must be 'function'", f"{where}.type")
        named.append(_read_named(tool, where))
    return mode, tuple(named)


def _read_named(data: Mapping[str, Any], path: str) -> tuple[str, str]:
    function = data.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.function.name: must be a string", f"{path}.function.name")
    return f"{path}.function.name", name


_MAX_JSON_BYTES = 32 * 1024
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "eos_token",
        "messages",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "tools",
        "unk_token",
    }
)


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Check the field ``chat_template_kwargs``.

    Raises:
        InvalidRequest: a name is reserved or not a valid variable name, or the data is too large.
    """
    for name in variables:
        path = f"chat_template_kwargs.{name[:100]}"
        if name in _RESERVED:
            raise InvalidRequest(f"{path}: this variable is reserved", path)
        if not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(f"{path}: is not a valid name of a template variable", path)
    try:
        num_bytes = len(msgspec.json.encode(variables))
    except UnicodeEncodeError:
        raise InvalidRequest("chat_template_kwargs: holds a lone surrogate", "chat_template_kwargs") from None
    if num_bytes > _MAX_JSON_BYTES:
        message = f"must have at most {_MAX_JSON_BYTES} bytes, not {num_bytes}"
        raise InvalidRequest(f"chat_template_kwargs: {message}", "chat_template_kwargs")


def read_thinking(
    enabled: bool | None, effort: Effort | None, budget: int | None, variables: Mapping[str, Any]
) -> Thinking:
    """Return the reasoning options of a request.

    Args:
        budget: -1 means no limit.

    Raises:
        InvalidRequest: one field enables reasoning and another one disables it.
    """
    said: dict[str, bool] = {} if enabled is None else {"enable_thinking": enabled}
    for name in _SWITCHES:
        if isinstance(value := variables.get(name), bool):
            said[f"chat_template_kwargs.{name}"] = value
    if effort == "none":
        said["reasoning_effort"], effort = False, None
    first = next(iter(said), None)
    none_left = {"thinking_budget": False} if budget == 0 else {}
    for name, value in {**said, **none_left}.items():
        if first is not None and value != said[first]:
            raise InvalidRequest(f"{name}: contradicts {first}; give one of them", name)
    enabled = None if first is None else said[first]
    return Thinking(enabled=enabled, budget=None if budget == -1 else budget, effort=effort)
