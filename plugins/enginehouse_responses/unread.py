"""Members of a request that nothing reads, which are listed as ignored.

Members that clients send back as they got them, such as ``id`` and ``status`` of an item, are known and have no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from enginehouse_responses.body import KNOWN_INCLUDES, PromptBody, ResponsesBody
from enginehouse_responses.tools import HOSTED_TOOLS

__all__ = ["find_unread"]

_OF_ALL = ("type", "id", "status")
_OF_CALL_OUTPUT = ("call_id", "output", "name")
_ITEMS: Mapping[str, Collection[str]] = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "function_call_output": _OF_CALL_OUTPUT,
    "custom_tool_call_output": _OF_CALL_OUTPUT,
    "reasoning": ("encrypted_content", "content", "summary"),
    "additional_tools": ("role", "tools"),
}
_PARTS: Mapping[str, Collection[str]] = {
    "refusal": ("type", "refusal"),
    "input_image": ("type", "image_url", "detail"),
    "input_audio": ("type", "input_audio"),
}
_OF_TEXT = ("type", "text", "annotations", "logprobs")
_TOOLS: Mapping[str, Collection[str]] = {
    "function": ("type", "name", "description", "parameters", "strict"),
    "custom": ("type", "name", "description", "format"),
    "namespace": ("type", "name", "description", "tools"),
}


def find_unread(body: PromptBody) -> Iterator[str]:
    """Yield the paths; the body's items and tools are known to have the right form."""
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        yield from _of_item(item, f"input[{index}]")
    yield from _of_tools(body.tools, "tools")
    yield from _others(body.tool_choice, "tool_choice", ("type", "name", "namespace", "mode", "tools"))
    yield from _others(body.text, "text", ("format", "verbosity"))
    form = body.text.get("format") if isinstance(body.text, dict) else None
    yield from _others(form, "text.format", ("type", "name", "description", "strict", "schema"))
    yield from _others(body.reasoning, "reasoning", ("effort", "summary"))
    if isinstance(body, ResponsesBody):
        yield from _others(body.stream_options, "stream_options", ("include_obfuscation",))
        for index, name in enumerate(body.include or ()):
            if name not in KNOWN_INCLUDES:
                yield f"include[{index}]"


def _of_item(item: Mapping[str, Any], path: str) -> Iterator[str]:
    kind = item.get("type", "message")
    if kind not in _ITEMS:
        return
    yield from _others(item, path, (*_OF_ALL, *_ITEMS[kind]))
    if kind == "additional_tools":
        yield from _of_tools(item.get("tools"), f"{path}.tools")
    for name in ("content", "output", "summary"):
        parts = item.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from _others(part, f"{path}.{name}[{index}]", _PARTS.get(part.get("type"), _OF_TEXT))


def _of_tools(tools: Any, path: str) -> Iterator[str]:
    for index, tool in enumerate(tools or ()):
        here, kind = f"{path}[{index}]", tool.get("type")
        if kind in HOSTED_TOOLS:
            continue  # listed as a whole
        yield from _others(tool, here, _TOOLS.get(kind, ()))
        if kind == "namespace":
            yield from _of_tools(tool.get("tools"), f"{here}.tools")
        if kind == "custom":
            yield from _others(tool.get("format"), f"{here}.format", ("type", "syntax", "definition"))


def _others(data: Any, path: str, known: Collection[str]) -> Iterator[str]:
    if isinstance(data, Mapping):
        yield from (f"{path}.{name}" for name, value in data.items() if name not in known and value is not None)
