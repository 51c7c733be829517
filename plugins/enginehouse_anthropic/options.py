"""Tools, tool choice, reasoning options and the output format, converted to values of the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.types import Constraint, Thinking, Tool, ToolUse
from enginehouse_anthropic.blocks import (
    CustomTool,
    OutputConfig,
    OutputFormat,
    ThinkingConfig,
    ToolChoice,
    convert,
    unknown_members,
)

__all__ = ["MAX_TOOLS", "read_output", "read_thinking", "read_tool_use"]

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_Mode = Literal["auto", "none", "required"]
_MODES: dict[str, _Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


def read_tool_use(call: Call) -> ToolUse | None:
    """Return the tools of a call's body and their permitted use; None without tools.

    Raises:
        InvalidRequest: a tool is wrong, or the choice does not fit the tools.
        UnsupportedParameter: a tool runs on Anthropic's servers, and the settings refuse what is not supported.
    """
    body = call.body
    if len(body.tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS} are allowed, not {len(body.tools)}", "tools")
    tools = tuple(_read_tools(call))
    choice = _read_choice(call)
    mode = _MODES[choice.type]
    if not tools:
        if mode == "required":
            raise InvalidRequest("tool_choice: a call is required, but tools is empty or missing", "tool_choice")
        return None
    if choice.name is not None and choice.type != "tool":
        call.ignore("tool_choice.name")
    parallel = False if choice.disable_parallel_tool_use else None
    only = choice.name if choice.type == "tool" else None
    if only is not None and only not in (tool.name for tool in tools):
        raise InvalidRequest(f"tool_choice.name: no tool has the name {quoted(only)}", "tool_choice.name")
    return ToolUse(tools=tools, choice=mode, only=only, parallel=parallel)


def _read_tools(call: Call) -> Iterator[Tool]:
    seen: set[str] = set()
    for index, data in enumerate(call.body.tools):
        path = f"tools[{index}]"
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            call.leave_out(path, f"this server runs no tools, and knows no schema of the type {quoted(kind)}")
            continue
        tool: CustomTool = convert(data, CustomTool, path)
        for name in unknown_members(data, tool, path):
            call.ignore(name)
        if _NAME.fullmatch(tool.name) is None:
            message = "must have 1 to 128 letters, digits, underscores, hyphens and dots"
            raise InvalidRequest(f"{path}.name: {message}", f"{path}.name")
        if tool.name in seen:
            raise InvalidRequest(f"{path}.name: another tool has the name {tool.name!r} already", f"{path}.name")
        seen.add(tool.name)
        yield _tool(tool, path)


def _tool(tool: CustomTool, path: str) -> Tool:
    schema = tool.input_schema
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.input_schema.type: must be 'object'", f"{path}.input_schema.type")
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": schema}
    return Tool(
        name=tool.name,
        parameters=schema,
        definition={"type": "function", "function": function},
        strict=bool(tool.strict),
        param=path,
    )


def _read_choice(call: Call) -> ToolChoice:
    data = call.body.tool_choice
    if data is None:
        return ToolChoice(type="auto")
    choice: ToolChoice = convert(data, ToolChoice, "tool_choice")
    for name in unknown_members(data, choice, "tool_choice"):
        call.ignore(name)
    if choice.type not in _MODES:
        raise InvalidRequest("tool_choice.type: must be 'auto', 'any', 'tool' or 'none'", "tool_choice.type")
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice.name: is required for the type 'tool'", "tool_choice.name")
    return choice


def read_thinking(call: Call, effort: str | None) -> Thinking:
    """Return the reasoning options of a call's body.

    Without ``thinking`` a model does not reason, or, where it cannot be stopped, its reasoning is closed at once.

    Raises:
        InvalidRequest: the options are wrong.
    """
    data = call.body.thinking
    if data is None:
        return Thinking(enabled=False, effort=effort)
    config: ThinkingConfig = convert(data, ThinkingConfig, "thinking")
    for name in unknown_members(data, config, "thinking"):
        call.ignore(name)
    if config.type not in _THINKING:
        raise InvalidRequest(f"thinking.type: must be one of {', '.join(map(repr, _THINKING))}", "thinking.type")
    if config.display not in (None, "summarized", "omitted"):
        raise InvalidRequest("thinking.display: must be 'summarized' or 'omitted'", "thinking.display")
    budget = config.budget_tokens if config.type == "enabled" else None
    if config.budget_tokens is not None and config.type != "enabled":
        call.ignore("thinking.budget_tokens")
    if config.type == "enabled" and (budget is None or budget < 1):
        message = "is required, and at least 1, for the type 'enabled'"
        raise InvalidRequest(f"thinking.budget_tokens: {message}", "thinking.budget_tokens")
    return Thinking(enabled=call.body.thinks, budget=budget, effort=effort)


def read_output(call: Call) -> tuple[str | None, Constraint | None]:
    """Return the effort, in the words of chat templates, and the constraint that the format puts on the text.

    Raises:
        InvalidRequest: the effort is unknown, or the format is not a JSON Schema.
    """
    config, path = OutputConfig(), "output_config"
    if (data := call.body.output_config) is not None:
        config = convert(data, OutputConfig, path)
        for name in unknown_members(data, config, path):
            call.ignore(name)
    if config.effort is not None and config.effort not in _EFFORTS:
        raise InvalidRequest(f"{path}.effort: must be one of {', '.join(_EFFORTS)}", f"{path}.effort")
    effort = None if config.effort is None else _EFFORTS[config.effort]
    wanted, path = config.format, f"{path}.format"
    if wanted is not None and call.body.output_format is not None:
        call.ignore("output_format")
    if wanted is None and call.body.output_format is not None:
        path = "output_format"
        wanted = convert(call.body.output_format, OutputFormat, path)
    if wanted is None:
        return effort, None
    if wanted.type != "json_schema":
        raise InvalidRequest(f"{path}.type: must be 'json_schema'", f"{path}.type")
    return effort, Constraint(kind="json_schema", text=msgspec.json.encode(wanted.schema).decode(), param=path)
