"""Turns of a conversation, converted to the messages that chat templates take.

Templates want one system message at the beginning and alternating roles; clients send system turns anywhere, several
turns of one role in a row, and calls beside their results. A system turn in the middle becomes a part of the user's
turn, so that what comes before it stays the same and is found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from attrs import define, field

from enginehouse.contract.calls import Call, arguments_text
from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter, quoted
from enginehouse.contract.types import MediaPart, Message, ToolCall
from enginehouse_anthropic.blocks import (
    HOSTED_BLOCKS,
    Base64Source,
    Block,
    ContentSource,
    DocumentBlock,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    convert,
    unknown_members,
)
from enginehouse_anthropic.signatures import Signatures

__all__ = ["read_conversation"]

_BILLING = "x-anthropic-billing-header:"
"""Beginning of a system block of Claude Code that differs in every request, so that no prefix would be cached."""

_SEPARATOR = "\n"
_OF_ROLE: dict[type[Any], str] = {
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolResultBlock: "user",
    ImageBlock: "user",
    DocumentBlock: "user",
    SearchResultBlock: "user",
}
"""The role of whose turns a block is a part; texts are of any."""


class _MessageBody(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Any]


@define
class _Turn:
    """Blocks of one role, each with its path in the request; ``path`` is that of the first turn of the client."""

    role: str
    path: str
    blocks: list[tuple[Block, str]] = field(factory=list)

    def of(self, *kinds: type[Any]) -> list[Any]:
        """Return the blocks of some types."""
        return [block for block, _ in self.blocks if isinstance(block, kinds)]


def read_conversation(call: Call, signatures: Signatures) -> tuple[Message, ...]:
    """Return the messages of a call's body; tells the call what has no effect.

    Raises:
        InvalidRequest: a message or a block is wrong.
        UnsupportedParameter: a block is one that this server cannot read.
    """
    system, turns = _read_turns(call)
    reader = _MessageReader(call, signatures)
    messages = [message for turn in turns for message in reader.messages(turn)]
    if system:
        messages.insert(0, Message(role="system", content=_SEPARATOR.join(system), param="system"))
    return tuple(messages)


def _read_turns(call: Call) -> tuple[list[str], list[_Turn]]:
    """Return the system prompt, and turns of alternating roles."""
    body = call.body
    system = list(_read_system(call, body.system, "system"))
    turns: list[_Turn] = []
    if not body.messages:
        raise InvalidRequest("messages: must hold at least one message", "messages")
    for index, data in enumerate(body.messages):
        path = f"messages[{index}]"
        message: _MessageBody = convert(data, _MessageBody, path)
        for name in unknown_members(data, message, path):
            call.ignore(name)
        if message.role == "system":
            texts = list(_read_system(call, message.content, f"{path}.content"))
            if not turns:
                system += texts
                continue
            turn = _Turn("user", path, [(_instruction(text), path) for text in texts])
        elif message.role in ("user", "assistant"):
            turn = _Turn(message.role, path, list(_read_blocks(call, message.role, message.content, f"{path}.content")))
        else:
            raise InvalidRequest(f"{path}.role: must be 'user', 'assistant' or 'system'", f"{path}.role")
        if turns and turns[-1].role == turn.role:
            turns[-1].blocks += turn.blocks
        else:
            turns.append(turn)
    return system, turns


def _instruction(text: str) -> TextBlock:
    return TextBlock(text=f"<system>\n{text}\n</system>")


def _read_system(call: Call, content: Any, path: str) -> Iterator[str]:
    """Yield the texts of a system prompt."""
    if not isinstance(content, str | list | None):
        raise InvalidRequest(f"{path}: must be a string or a list of text blocks", path)
    if isinstance(content, str):
        yield content
    for index, data in enumerate(content if isinstance(content, list) else ()):
        where = f"{path}[{index}]"
        block: TextBlock = convert(data, TextBlock, where)
        for name in unknown_members(data, block, where):
            call.ignore(name)
        if block.text.startswith(_BILLING):
            call.ignore(where)
        else:
            yield block.text


def _read_blocks(call: Call, role: str, content: str | list[Any], path: str) -> Iterator[tuple[Block, str]]:
    if isinstance(content, str):
        yield TextBlock(text=content), path
        return
    for index, data in enumerate(content):
        where = f"{path}[{index}]"
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and HOSTED_BLOCKS.fullmatch(kind):
            call.leave_out(where, f"blocks of the type {quoted(kind)} are of tools on Anthropic's servers")
            continue
        block: Block = convert(data, Block, where)
        if _OF_ROLE.get(type(block), role) != role:
            raise InvalidRequest(f"{where}.type: {kind!r} is not a block of the role {role!r}", f"{where}.type")
        for name in unknown_members(data, block, where):
            call.ignore(name)
        yield block, where


class _MessageReader:
    """Converts turns in their order; knows the names of the calls so far."""

    def __init__(self, call: Call, signatures: Signatures) -> None:
        self._call = call
        self._signatures = signatures
        self._names: dict[str, str] = {}

    def messages(self, turn: _Turn) -> Iterator[Message]:
        """Yield the messages of a turn."""
        if turn.role == "assistant":
            yield self._assistant(turn)
            return
        results = [(block, path) for block, path in turn.blocks if isinstance(block, ToolResultBlock)]
        others = [(block, path) for block, path in turn.blocks if not isinstance(block, ToolResultBlock)]
        for result, path in results:
            yield self._result(result, path)
        if others or not results:
            parts = [part for block, path in others for part in _parts(block, path)]
            yield Message(role="user", **_content(parts), param=turn.path)

    def _assistant(self, turn: _Turn) -> Message:
        calls = []
        for block, path in turn.blocks:
            if not isinstance(block, ToolUseBlock):
                continue
            self._names[block.id] = block.name
            arguments = arguments_text(block.input, f"{path}.input")
            calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
        return Message(
            role="assistant",
            content=_SEPARATOR.join(block.text for block in turn.of(TextBlock)),
            reasoning=_SEPARATOR.join(filter(None, map(self._thinking, turn.blocks))) or None,
            tool_calls=tuple(calls),
            param=turn.path,
        )

    def _thinking(self, placed: tuple[Block, str]) -> str:
        block, path = placed
        if isinstance(block, ThinkingBlock):
            return block.thinking or self._signatures.open(block.signature or "") or ""
        if isinstance(block, RedactedThinkingBlock):
            self._call.ignore(path)
        return ""

    def _result(self, block: ToolResultBlock, path: str) -> Message:
        content = block.content or ""
        parts: list[str | MediaPart] = []
        if isinstance(content, str):
            parts.append(content)
        else:
            for index, inner in enumerate(content):
                parts += _parts(inner, f"{path}.content[{index}]")
        if block.is_error:
            parts.insert(0, "Error:")
        name = self._names.get(block.tool_use_id)
        return Message(role="tool", name=name, tool_call_id=block.tool_use_id, **_content(parts), param=path)


def _content(parts: Sequence[str | MediaPart]) -> dict[str, Any]:
    """Return the members of a message that hold its content."""
    text = _SEPARATOR.join(part for part in parts if isinstance(part, str))
    has_media = any(isinstance(part, MediaPart) for part in parts)
    return {"content": text, "parts": tuple(parts) if has_media else ()}


def _parts(block: Any, path: str) -> Iterator[str | MediaPart]:
    """Yield the texts and images of a block."""
    if isinstance(block, TextBlock):
        yield block.text
    elif isinstance(block, ImageBlock):
        yield _image(block, path)
    elif isinstance(block, ToolReferenceBlock):
        yield block.tool_name
    elif isinstance(block, SearchResultBlock):
        texts = (text.text for text in block.content)
        yield _SEPARATOR.join(("<search_result>", block.title, block.source, *texts, "</search_result>"))
    elif isinstance(block, DocumentBlock):
        yield _SEPARATOR.join(filter(None, ("<document>", block.title, block.context)))
        yield from _document(block, f"{path}.source")
        yield "</document>"


def _image(block: ImageBlock, path: str) -> MediaPart:
    match block.source:
        case Base64Source(media_type=media_type, data=data):
            url = f"data:{media_type};base64,{data}"
        case UrlSource(url=url):
            pass
        case _:
            raise UnsupportedParameter(f"{path}.source: this server keeps no files; send the data", f"{path}.source")
    return MediaPart(kind="image_url", value={"url": url}, param=path)


def _document(block: DocumentBlock, path: str) -> Iterator[str | MediaPart]:
    match block.source:
        case TextSource(data=text) | ContentSource(content=str(text)):
            yield text
        case ContentSource(content=inner):
            for index, one in enumerate(inner):
                yield from _parts(one, f"{path}.content[{index}]")
        case _:
            message = "only documents of the types 'text' and 'content' are read; send the text of a PDF file"
            raise UnsupportedParameter(f"{path}: {message}", path)
