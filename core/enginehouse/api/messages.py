"""Chat messages on the wire -> :class:`enginehouse.types.Message`.

Text parts of one message are joined with a line break. ``developer`` is another name for ``system``.
What a text model cannot take (images, tool calls) is refused with its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from enginehouse.api.unsupported import refuse
from enginehouse.errors import InvalidRequest, UnsupportedParameter
from enginehouse.types import Message

__all__ = ["PART_SEPARATOR", "MessageBody", "find_ignored_in_messages", "read_messages"]

PART_SEPARATOR = "\n"
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id")
_OTHER_MEDIA = ("image_url", "image", "input_image", "input_audio", "video_url", "file")


@frozen(kw_only=True)
class MessageBody:
    """One message as the client sent it, before its content is read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None


def read_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """The messages.

    Raises:
        InvalidRequest: there is none, or a content is wrong.
        UnsupportedParameter: a message holds something that this server cannot use.
    """
    if not bodies:
        raise InvalidRequest("messages: must hold at least one message", "messages")
    return tuple(_read_message(body, f"messages[{index}]") for index, body in enumerate(bodies))


def find_ignored_in_messages(data: Any) -> Iterator[str]:
    """Paths of fields in messages that nobody knows."""
    known = {attribute.name for attribute in attrs.fields(MessageBody)}
    for index, message in enumerate(data if isinstance(data, list) else ()):
        if isinstance(message, Mapping):
            yield from (f"messages[{index}].{key}" for key in message if key not in known)


def _read_message(body: MessageBody, path: str) -> Message:
    if body.role in _TOOL_ROLES:
        raise refuse(f"{path}.role")
    for name in _TOOL_FIELDS:
        if getattr(body, name):
            raise refuse(f"{path}.{name}")
    role = "system" if body.role == "developer" else body.role
    content = _read_content(body.content, f"{path}.content")
    if content is None:
        if role != "assistant":
            raise InvalidRequest(f"{path}.content: is required", f"{path}.content")
        content = body.refusal or ""
    return Message(role=role, content=content, name=body.name)


def _read_content(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of parts", path)
    if not content:
        raise InvalidRequest(f"{path}: must hold at least one part", path)
    return PART_SEPARATOR.join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    kind = part.get("type")
    if kind in _OTHER_MEDIA:
        raise UnsupportedParameter(f"{path}: this model takes text only, not {kind}", path)
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{path}.type: must be 'text'", f"{path}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{kind}: must be a string", f"{path}.{kind}")
    return text
