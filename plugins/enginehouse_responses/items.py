"""Input items: checks them, and converts them to the messages of a chat.

Items of the assistant that follow each other (reasoning, text, calls) are one message, as chat templates expect. Items
are plain JSON objects; unknown types are refused by path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, field

from enginehouse.contract.calls import arguments_text
from enginehouse.contract.errors import quoted
from enginehouse.contract.types import MediaPart, Message, ToolCall
from enginehouse_responses.reading import Node, invalid, node_of
from enginehouse_responses.sealed import Seal
from enginehouse_responses.tools import flat_name

__all__ = ["CALL_OUTPUTS", "call_of", "items_of", "read_items", "reference_of"]

_PART_SEPARATOR = "\n"

CALL_OUTPUTS: Mapping[str, str] = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
}
"""Type of an item with the output of a call to the type of its call."""

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def items_of(value: Any) -> list[dict[str, Any]]:
    """Return ``input`` as a list of items: a string is the text of a user.

    Raises:
        InvalidRequest: it is neither a string nor a list of objects.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list):
        raise invalid("input", "must be a string or a list of items")
    return [node_of(item, f"input[{index}]").data for index, item in enumerate(value)]


def call_of(item: Mapping[str, Any]) -> str | None:
    """Return the id that connects a call with its output; None for other items."""
    kind = item.get("type")
    call_id = item.get("call_id") if kind in CALL_OUTPUTS or kind in CALL_OUTPUTS.values() else None
    return call_id if isinstance(call_id, str) else None


def reference_of(item: Mapping[str, Any]) -> str | None:
    """Return the id of the stored item to which an item refers; None for other items."""
    kind = item.get("type", None if "role" in item else "item_reference")  # the type may be missing
    item_id = item.get("id") if kind == "item_reference" else None
    return item_id if isinstance(item_id, str) else None


def read_items(items: Sequence[Mapping[str, Any]], seal: Seal, num_before: int = 0) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    Args:
        items: with those of earlier responses first.
        num_before: number of those; paths in errors count from the first item of the request.

    Raises:
        InvalidRequest: an item is malformed or of an unknown type, or an output has no call.
    """
    chat = _Chat(seal)
    for index, item in enumerate(items):
        number = index - num_before
        path = f"input[{number}]" if number >= 0 else f"previous_response_id.input[{index}]"
        chat.add(node_of(item, path))
    return chat.end()


@define
class _Turn:
    """The message of an assistant, while it is put together; ``path`` is that of its first item."""

    path: str
    reasoning: list[str] = field(factory=list)
    content: str | None = None
    calls: list[ToolCall] = field(factory=list)


class _Chat:
    """Collects messages."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        self._names: dict[str, str] = {}  # of the called function, by call id

    def end(self) -> tuple[Message, ...]:
        """Return all messages."""
        self._close()
        return tuple(self._messages)

    def add(self, item: Node) -> None:
        """Add an item."""
        kind = item.data.get("type", "message" if "role" in item.data else None)
        match kind:
            case "message":
                self._message(item)
            case "function_call":
                self._call(item, arguments_text(item.data.get("arguments"), item.at("arguments")))
            case "custom_tool_call":
                self._call(item, msgspec.json.encode({"input": item.text("input")}).decode())
            case "function_call_output" | "custom_tool_call_output":
                self._output(item)
            case "reasoning":
                self._reasoning(item)
            case "additional_tools":
                pass  # read with the tools
            case "item_reference":
                raise invalid(item.at("id"), f"no stored item has the id {quoted(item.data.get('id'))}")
            case "compaction":
                raise invalid(item.path, "this server cannot read compacted conversations")
            case _:
                raise invalid(item.at("type"), f"items of the type {quoted(kind)} are not known here")

    def _message(self, item: Node) -> None:
        role = item.one_of("role", *_ROLES)
        content, parts = _read_content(item, "content")
        if role != "assistant":
            self._close()
            self._messages.append(Message(role=role, content=content, parts=parts, param=item.path))
            return
        if parts:
            raise invalid(item.at("content"), "messages of the assistant hold text only")
        if self._turn is None or self._turn.content is not None or self._turn.calls:
            self._close()
        self._open(item).content = content

    def _call(self, item: Node, arguments: str) -> None:
        call_id, name = item.text("call_id"), flat_name(item.optional_text("namespace"), item.text("name"))
        self._names[call_id] = name
        self._open(item).calls.append(ToolCall(id=call_id, name=name, arguments=arguments))

    def _output(self, item: Node) -> None:
        call_id = item.text("call_id")
        if call_id not in self._names:
            raise invalid(item.at("call_id"), f"no call before it has the id {quoted(call_id)}")
        content, parts = _read_content(item, "output")
        self._close()
        self._messages.append(
            Message(
                role="tool",
                content=content,
                parts=parts,
                tool_call_id=call_id,
                name=self._names[call_id],
                param=item.path,
            )
        )

    def _reasoning(self, item: Node) -> None:
        if self._turn is not None and (self._turn.content is not None or self._turn.calls):
            self._close()
        blob = item.optional_text("encrypted_content")
        text = self._seal.unpack(blob) if blob is not None else None
        for name in ("content", "summary"):
            if not text and item.data.get(name):
                text, _ = _read_content(item, name)
        if text:
            self._open(item).reasoning.append(text)

    def _open(self, item: Node) -> _Turn:
        self._turn = self._turn or _Turn(item.path)
        return self._turn

    def _close(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages.append(
                Message(
                    role="assistant",
                    content=turn.content or "",
                    reasoning="\n".join(turn.reasoning) or None,
                    tool_calls=tuple(turn.calls),
                    param=turn.path,
                )
            )


def _read_content(item: Node, name: str) -> tuple[str, tuple[str | MediaPart, ...]]:
    """Return the joined text of a content, and its parts if some are not text."""
    content = item.data.get(name)
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list):
        raise invalid(item.at(name), "must be a string or a list of parts")
    parts = tuple(_read_part(part) for part in item.objects(name))
    text = _PART_SEPARATOR.join(part for part in parts if isinstance(part, str))
    return text, parts if any(isinstance(part, MediaPart) for part in parts) else ()


def _read_part(part: Node) -> str | MediaPart:
    kind = part.data.get("type")
    if kind in _TEXTS:
        return part.text("text")
    if kind == "refusal":
        return part.text("refusal")
    if kind == "input_image":
        if part.data.get("image_url") is None:
            raise invalid(part.at("image_url"), "is required: this server keeps no files")
        value: dict[str, Any] = {"url": part.text("image_url")}
        detail = part.one_of("detail", "auto", "low", "high", "original", default="auto")
        value["detail"] = "high" if detail == "original" else detail
        return MediaPart(kind="image_url", value=value, param=part.path)
    if kind == "input_audio":
        return MediaPart(kind=kind, value=part.data.get(kind), param=part.path)
    if kind == "input_file":
        raise invalid(part.path, "models of this server read no files; send their text")
    raise invalid(part.at("type"), f"parts of the type {quoted(kind)} are not known here")
