"""Chat messages on the wire -> :class:`enginehouse.contract.types.Message`.

Text parts of one message are joined with a line break. ``developer`` is another name for ``system``. Parts that are
no text are passed on unread: the pipeline reads them once it knows whether the model takes them. ``function_call`` and
the role ``function``, which tools have replaced, are refused with their path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from enginehouse.api.openai.tool_turns import find_ignored_in_calls, read_tool_calls, with_function_names
from enginehouse.api.openai.unsupported import refuse
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import MediaPart, Message

__all__ = ["PART_SEPARATOR", "MessageBody", "find_ignored_in_messages", "read_messages"]

PART_SEPARATOR = "\n"
_MEDIA = ("image_url", "image", "input_image", "input_audio", "video_url", "file")


@frozen(kw_only=True)
class MessageBody:
    """One message as the client sent it, before its content is read.

    Attributes:
        reasoning: another name of ``reasoning_content``.
        compress: false keeps compressors away from this message; so it does in a part of its content.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    compress: bool | None = None


_KNOWN = frozenset(attribute.name for attribute in attrs.fields(MessageBody))
_OF_ROLE = {"reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
"""Fields that only messages of one role have."""


def read_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """The messages.

    Raises:
        InvalidRequest: there is none, or a content is wrong.
        UnsupportedParameter: a message holds something that this server cannot use.
    """
    if not bodies:
        raise InvalidRequest("messages: must hold at least one message", "messages")
    return with_function_names(_read_message(body, f"messages[{index}]") for index, body in enumerate(bodies))


def find_ignored_in_messages(data: Any) -> Iterator[str]:
    """Paths of fields in messages that nobody knows, or that mean nothing where they stand."""
    for index, message in enumerate(data if isinstance(data, list) else ()):
        if isinstance(message, Mapping):
            path = f"messages[{index}]"
            yield from (f"{path}.{key}" for key, value in message.items() if not _has_effect(key, value, message))
            yield from _ignored_in_parts(message.get("content"), f"{path}.content")
            yield from find_ignored_in_calls(message.get("tool_calls"), f"{path}.tool_calls")


def _has_effect(key: str, value: Any, message: Mapping[str, Any]) -> bool:
    if key in _OF_ROLE:
        return message.get("role") == _OF_ROLE[key] and (key != "reasoning" or isinstance(value, str))
    return key in _KNOWN and not (key in ("annotations", "audio") and value)


def _ignored_in_parts(content: Any, path: str) -> Iterator[str]:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping):
            known = ("type", "compress", part.get("type"))
            yield from (f"{path}[{index}].{key}" for key in part if key not in known)


def _read_message(body: MessageBody, path: str) -> Message:
    if body.role == "function":
        raise refuse(f"{path}.role")
    if body.function_call:
        raise refuse(f"{path}.function_call")
    role = "system" if body.role == "developer" else body.role
    calls = read_tool_calls(body.tool_calls, f"{path}.tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls: only the assistant calls tools", f"{path}.tool_calls")
    parts = () if calls and body.content == [] else _read_parts(body.content, f"{path}.content")
    content = PART_SEPARATOR.join(part for part in parts if isinstance(part, str)) if parts else None
    if content is None:
        if role not in ("assistant", "tool"):
            raise InvalidRequest(f"{path}.content: is required", f"{path}.content")
        content = body.refusal or ""
    reasoning = body.reasoning if isinstance(body.reasoning, str) else None
    return Message(
        role=role,
        content=content,
        name=body.name,
        parts=parts if any(isinstance(part, MediaPart) for part in parts) else (),
        verbatim=_verbatim(body, parts, f"{path}.content"),
        reasoning=(body.reasoning_content or reasoning) if role == "assistant" else None,
        tool_calls=calls,
        tool_call_id=body.tool_call_id if role == "tool" else None,
    )


def _read_parts(content: Any, path: str) -> tuple[str | MediaPart, ...]:
    """A string is one part; nothing is none."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of parts", path)
    if not content:
        raise InvalidRequest(f"{path}: must hold at least one part", path)
    return tuple(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _verbatim(body: MessageBody, parts: Sequence[str | MediaPart], path: str) -> tuple[tuple[int, int], ...]:
    """Where the joined content must stay as it is: everywhere, or in the parts that say ``compress: false``."""
    items = body.content if isinstance(body.content, list) else [None] * len(parts)
    marked: list[tuple[int, int]] = []
    start = 0
    for index, (item, part) in enumerate(zip(items, parts, strict=False)):
        said = item.get("compress") if isinstance(item, dict) else None
        if said is not None and not isinstance(said, bool):
            raise InvalidRequest(f"{path}[{index}].compress: must be true or false", f"{path}[{index}].compress")
        if not isinstance(part, str):
            continue
        end = start + len(part)
        if part and (said is False or body.compress is False):
            marked.append((start, end))
        start = end + len(PART_SEPARATOR)
    return tuple(marked)


def _read_part(part: Any, path: str) -> str | MediaPart:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    kind = part.get("type")
    if kind in _MEDIA:
        return MediaPart(kind=kind, value=part.get(kind), param=path)
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{path}.type: must be 'text' or 'image_url'", f"{path}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{kind}: must be a string", f"{path}.{kind}")
    return text
