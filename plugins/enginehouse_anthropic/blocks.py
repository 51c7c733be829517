"""Blocks of content and tools as a client writes them, and how they are read: one struct per type of block.

Called by the readers of messages and tools. Knows no models and no server.

Source: Anthropic's Messages API, as its Python SDK 2.14 declares it (``anthropic/types``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from enginehouse.contract.errors import InvalidRequest

__all__ = [
    "HOSTED_BLOCKS",
    "Base64Source",
    "Block",
    "ContentSource",
    "CustomTool",
    "DocumentBlock",
    "FileSource",
    "ImageBlock",
    "OutputConfig",
    "OutputFormat",
    "RedactedThinkingBlock",
    "SearchResultBlock",
    "TextBlock",
    "TextSource",
    "ThinkingBlock",
    "ThinkingConfig",
    "ToolChoice",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "UrlSource",
    "convert",
    "unknown_members",
]


class _Tagged(msgspec.Struct, kw_only=True, tag_field="type"):
    """An object whose member ``type`` names its struct."""


class Base64Source(_Tagged, tag="base64"):
    """Bytes of an image or a document."""

    media_type: str
    data: str


class UrlSource(_Tagged, tag="url"):
    """An address."""

    url: str


class FileSource(_Tagged, tag="file"):
    """A file that was uploaded before."""

    file_id: str


class TextSource(_Tagged, tag="text"):
    """The text of a document."""

    data: str
    media_type: str = "text/plain"


class TextBlock(_Tagged, tag="text"):
    """A text; ``cache_control`` is a hint that the prefix cache does not need."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ImageBlock(_Tagged, tag="image"):
    """An image."""

    source: Base64Source | UrlSource | FileSource
    cache_control: Any = None


class ContentSource(_Tagged, tag="content"):
    """The content of a document as blocks."""

    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(_Tagged, tag="document"):
    """A document."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    cache_control: Any = None


class SearchResultBlock(_Tagged, tag="search_result"):
    """A passage that the client has found."""

    source: str
    title: str
    content: list[TextBlock]
    cache_control: Any = None


class ThinkingBlock(_Tagged, tag="thinking"):
    """Reasoning of an earlier turn."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Tagged, tag="redacted_thinking"):
    """Encrypted reasoning of an earlier turn."""

    data: str


class ToolUseBlock(_Tagged, tag="tool_use"):
    """A call of the assistant. ``input`` is checked with the call."""

    id: str
    name: str
    input: Any = None
    caller: Any = None
    cache_control: Any = None


class ToolReferenceBlock(_Tagged, tag="tool_reference"):
    """The name of a tool, in the result of a search for tools."""

    tool_name: str
    cache_control: Any = None


class ToolResultBlock(_Tagged, tag="tool_result"):
    """Result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)

HOSTED_BLOCKS = re.compile(r"server_tool_use|mcp_tool_\w+|\w+_tool_result|container_upload|compaction|fallback")
"""Types of blocks that only tools and features of Anthropic's own servers write."""


class CustomTool(msgspec.Struct, kw_only=True, frozen=True):
    """A tool that the client runs. ``cache_control`` and ``eager_input_streaming`` are not needed here."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, frozen=True):
    """Allowed use of tools; ``name`` is that of the only one, for the type ``tool``."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Reasoning options."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True):
    """The format of the text of an answer."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Effort for an answer, and its format."""

    effort: str | None = None
    format: OutputFormat | None = None


_MAX_CHARS = 200
_PLACE = re.compile(r" - at `(?:key )?\$([^`]*)`$")


def convert(value: Any, kind: Any, path: str) -> Any:
    """Return ``value``, plain JSON data, as a struct; values are never coerced.

    Args:
        kind: the struct, or a union of tagged ones.
        path: of the value in the request's body.

    Raises:
        InvalidRequest: it is something else; ``param`` is the path of the wrong member.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        where = path + (place[1].replace("[...]", "") if place is not None else "")
        raise InvalidRequest(f"{where}: {_PLACE.sub('', str(error))[:_MAX_CHARS]}", where) from error
    except RecursionError as error:
        raise InvalidRequest(f"{path}: is nested too deeply", path) from error


def unknown_members(value: Any, converted: Any, path: str) -> Iterator[str]:
    """Yield the paths of members of ``value`` that its struct does not have."""
    if isinstance(value, list):
        for index, (item, struct) in enumerate(zip(value, converted, strict=False)):
            yield from unknown_members(item, struct, f"{path}[{index}]")
    elif isinstance(value, Mapping) and isinstance(converted, msgspec.Struct):
        known = {*converted.__struct_fields__, converted.__struct_config__.tag_field}
        for name, member in value.items():
            if name not in known:
                yield f"{path}.{name}"
            elif isinstance(member, Mapping | list):
                yield from unknown_members(member, getattr(converted, name, None), f"{path}.{name}")
