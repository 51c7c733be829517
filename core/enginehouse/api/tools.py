"""Tools on the wire -> :class:`enginehouse.types.ToolUse`: which functions there are, and which may be called.

``functions`` and ``function_call``, which OpenAI has replaced by these, are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from enginehouse.errors import InvalidRequest
from enginehouse.types import Tool, ToolUse

__all__ = ["MAX_TOOLS", "FunctionBody", "ToolBody", "find_ignored_in_choice", "find_ignored_in_tools", "read_tool_use"]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@frozen(kw_only=True)
class FunctionBody:
    """A function. Calls that are required match ``parameters`` in any case, others with ``strict``."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@frozen(kw_only=True)
class ToolBody:
    """One of ``tools``."""

    type: Literal["function"]
    function: FunctionBody


def read_tool_use(tools: Sequence[ToolBody], choice: Any, parallel: bool | None) -> ToolUse | None:
    """The tools and how they may be used; None without any.

    Raises:
        InvalidRequest: a tool is malformed, or the choice does not fit the tools.
    """
    mode, only = _read_choice(choice)
    if not tools:
        if mode == "required":
            raise InvalidRequest("tool_choice: a call is required, but there are no tools", "tool_choice")
        return None
    read = tuple(_read_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            path = f"tools[{index}].function.name"
            raise InvalidRequest(f"{path}: another tool has the name {tool.name!r} already", path)
        seen.add(tool.name)
    if only is not None and only not in seen:
        path = "tool_choice.function.name"
        raise InvalidRequest(f"{path}: no tool has the name {only[:100]!r}", path)
    return ToolUse(tools=read, choice=mode, only=only, parallel=parallel)


def find_ignored_in_tools(tools: Any) -> Iterator[str]:
    """Paths of unknown fields."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, Mapping):
            yield from _unknown(tool, ToolBody, f"tools[{index}]")
            function = tool.get("function")
            if isinstance(function, Mapping):
                yield from _unknown(function, FunctionBody, f"tools[{index}].function")


def find_ignored_in_choice(choice: Any) -> Iterator[str]:
    """Paths of unknown fields in ``tool_choice``."""
    if isinstance(choice, Mapping):
        yield from (f"tool_choice.{name}" for name in choice if name not in ("type", "function"))
        function = choice.get("function")
        if isinstance(function, Mapping):
            yield from (f"tool_choice.function.{name}" for name in function if name != "name")


def _unknown(data: Mapping[str, Any], body: type[Any], path: str) -> Iterator[str]:
    known = {attribute.name for attribute in attrs.fields(body)}
    return (f"{path}.{name}" for name in data if name not in known)


def _read_tool(function: FunctionBody, path: str) -> Tool:
    if _NAME.fullmatch(function.name) is None:
        message = "must have 1 to 64 letters, digits, underscores and hyphens"
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


def _read_choice(choice: Any) -> tuple[Literal["auto", "none", "required"], str | None]:
    """How to choose, and the only function that may be called."""
    if choice is None:
        return "auto", None
    if choice in ("auto", "none", "required"):
        return choice, None
    if not isinstance(choice, dict):
        raise InvalidRequest("tool_choice: must be 'none', 'auto', 'required', or an object", "tool_choice")
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice.type: must be 'function'", "tool_choice.type")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice.function.name: must be a string", "tool_choice.function.name")
    return "required", name
