"""Tools of a request: functions, custom tools and namespaces, as functions of the model and back.

A custom tool takes free text; the model sees a function with one string, ``input``. A format, Lark or a regular
expression, becomes the ``pattern`` of that string, so that the grammar of the call enforces it. A namespace's tools get
its name as a prefix. Tools that only OpenAI's servers run (``web_search``, ``mcp``, ...) are left out and listed.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import frozen

from enginehouse.contract.errors import quoted
from enginehouse.contract.fields import MAX_TOOLS
from enginehouse.contract.types import Tool, ToolUse
from enginehouse_responses.lark import LarkProblem, regex_of_lark
from enginehouse_responses.reading import Node, invalid, nodes_of

__all__ = ["HOSTED_TOOLS", "KnownTool", "Toolbox", "flat_name"]

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_MAX_PATTERN_CHARS = 100_000


@frozen(kw_only=True)
class KnownTool:
    """A tool as the client knows it; ``name`` is without the namespace."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    tool: Tool


class Toolbox:
    """The tools of one request.

    Attributes:
        echoed: the tools for the response, functions with all their members.
        left_out: paths of tools that this server does not run.
    """

    def __init__(self) -> None:
        self.echoed: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._known: dict[str, KnownTool] = {}

    def add(self, tools: Any, path: str) -> None:
        """Add a list of tools.

        Raises:
            InvalidRequest: a tool is malformed or unknown, or two have the same name.
        """
        for tool in nodes_of(tools, path):
            self._add(tool, None)
        if len(self._known) > MAX_TOOLS:
            raise invalid(path, f"at most {MAX_TOOLS} tools are allowed, not {len(self._known)}")

    def find(self, flat_name: str) -> KnownTool | None:
        """Return the tool that the model calls by this name."""
        return self._known.get(flat_name)

    def use(self, choice: Any, parallel: bool | None) -> ToolUse | None:
        """Return the tools and their permitted use; None without tools.

        Raises:
            InvalidRequest: ``choice`` does not fit the tools.
        """
        mode, names, is_single = self._read_choice(choice)
        if not self._known:
            if mode == "required" and not self.left_out:
                raise invalid("tool_choice", "a call is required, but tools is empty or missing")
            return None
        tools = tuple(known.tool for known in self._known.values())
        only = names[0] if names and is_single else None
        allowed = None if names is None or is_single else frozenset(names)
        return ToolUse(tools=tools, choice=mode, only=only, allowed=allowed, parallel=parallel)

    # -- tools -------------------------------------------------------------------------------------

    def _add(self, tool: Node, namespace: str | None) -> None:
        kind = tool.text("type")
        if kind == "namespace" and namespace is None:
            self.echoed.append(tool.data)
            name = tool.text("name")
            for inner in tool.objects("tools"):
                self._add(inner, name)
        elif kind in ("function", "custom"):
            self._keep(_function(tool, namespace) if kind == "function" else _custom(tool, namespace), tool)
            if namespace is None:
                self.echoed.append(_whole(tool.data) if kind == "function" else tool.data)
        elif kind in HOSTED_TOOLS and namespace is None:
            self.left_out.append(tool.path)
        else:
            raise invalid(tool.at("type"), f"no tools of the type {quoted(kind)} are known here")

    def _keep(self, known: KnownTool, tool: Node) -> None:
        if self._known.setdefault(known.tool.name, known) is not known:
            raise invalid(tool.at("name"), f"another tool has the name {known.tool.name!r} already")

    # -- choice ------------------------------------------------------------------------------------

    def _read_choice(self, choice: Any) -> tuple[Literal["auto", "none", "required"], list[str] | None, bool]:
        """Return the mode, the only tools that may be called (None means all), and whether that is one named tool."""
        if choice is None:
            return "auto", None, False
        if choice in ("auto", "none", "required"):
            return choice, None, False
        if not isinstance(choice, dict):
            raise invalid("tool_choice", f"must be 'none', 'auto', 'required' or an object, not {quoted(choice)}")
        node = Node(choice, "tool_choice")
        kind = node.text("type")
        if kind in ("function", "custom"):
            return "required", [self._named(node)], True
        if kind == "allowed_tools":
            mode = node.one_of("mode", "auto", "required")
            named = [self._named(tool) for tool in node.objects("tools") if tool.text("type") not in HOSTED_TOOLS]
            return ("required" if mode == "required" else "auto"), named, False
        if kind in HOSTED_TOOLS:
            self.left_out.append(node.path)
            return "auto", None, False
        raise invalid(node.at("type"), "must be 'function', 'custom' or 'allowed_tools'")

    def _named(self, node: Node) -> str:
        name, namespace = node.text("name"), node.optional_text("namespace")
        found = self._known.get(flat_name(namespace, name))
        if found is None or found.kind != node.text("type"):
            raise invalid(node.at("name"), f"no {node.text('type')[:20]} tool has the name {quoted(name)}")
        return found.tool.name


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _checked_name(tool: Node, namespace: str | None) -> str:
    name = flat_name(namespace, tool.text("name"))
    if _NAME.fullmatch(name) is None:
        raise invalid(tool.at("name"), "must have 1 to 128 letters, digits, underscores, hyphens and dots")
    return name


def _function(tool: Node, namespace: str | None) -> KnownTool:
    name, description = _checked_name(tool, namespace), tool.optional_text("description")
    given = tool.data.get("parameters")
    parameters = tool.object("parameters").data if given else {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        raise invalid(f"{tool.at('parameters')}.type", "must be 'object'")
    made = Tool(
        name=name,
        parameters=parameters,
        definition=_definition(name, description, parameters),
        strict=bool(tool.optional_flag("strict")),
        param=tool.path,
    )
    return KnownTool(kind="function", name=tool.text("name"), namespace=namespace, tool=made)


def _custom(tool: Node, namespace: str | None) -> KnownTool:
    name, description = _checked_name(tool, namespace), tool.optional_text("description") or ""
    pattern, note = None, ""
    if tool.data.get("format") is not None:
        pattern, note = _read_format(tool.object("format"))
    said = {"type": "string", "description": "The input of the tool, as plain text."}
    shown = _input_object(said)
    enforced = _input_object({"type": "string"} if pattern is None else {"type": "string", "pattern": pattern})
    made = Tool(
        name=name,
        parameters=enforced,
        definition=_definition(name, f"{description}{note}".strip() or None, shown),
        strict=pattern is not None,
        param=tool.path,
    )
    return KnownTool(kind="custom", name=tool.text("name"), namespace=namespace, tool=made)


def _read_format(form: Node) -> tuple[str | None, str]:
    """Return the pattern of the input, and a note for the model."""
    if form.one_of("type", "text", "grammar") == "text":
        return None, ""
    syntax, definition = form.one_of("syntax", "lark", "regex"), form.text("definition")
    pattern = definition
    if syntax == "lark":
        try:
            pattern = regex_of_lark(definition, _MAX_PATTERN_CHARS)
        except LarkProblem as error:
            raise invalid(form.at("definition"), str(error)) from error
    words = "Lark grammar" if syntax == "lark" else "regular expression"
    return f"^(?:{pattern})$", f"\n\nThe input must match this {words}:\n{definition}"


def _input_object(text: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def _definition(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _whole(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function with all members that clients expect."""
    return {"description": None, "parameters": None, "strict": None, **function}
