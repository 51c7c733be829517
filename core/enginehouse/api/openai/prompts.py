"""The prompts of requests: chat messages with their tool calls and results, raw prompts, and predicted outputs.

Raw prompts get no chat template; control-token strings in them are control tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import evolve

from enginehouse.contract.calls import arguments_text
from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter
from enginehouse.contract.fields import FIELDS
from enginehouse.contract.refusals import refuse
from enginehouse.contract.rows import INT64_MAX
from enginehouse.contract.shapes import MessageBody
from enginehouse.contract.types import MediaPart, Message, ToolCall
from enginehouse.settings.structuring import without_fraction


def read_tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    """Read the calls of an assistant message.

    Raises:
        InvalidRequest: they are not a list of function calls.
    """
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}: must be a list", path)
    return tuple(_read_call(call, index, f"{path}[{index}]") for index, call in enumerate(calls))


def find_ignored_in_calls(calls: Any, path: str) -> Iterator[str]:
    """Yield paths of unknown fields in calls; ``index`` is known, as clients that assemble streams send it back."""
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping):
            yield from (f"{path}[{number}].{key}" for key in call if key not in ("id", "type", "function", "index"))
            function = call.get("function")
            if isinstance(function, Mapping):
                inner = f"{path}[{number}].function"
                yield from (f"{inner}.{key}" for key in function if key not in ("name", "arguments"))


def with_function_names(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Add the called function's name to tool results, for templates that require it."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            named.append(evolve(message, name=names[message.tool_call_id]))
        else:
            named.append(message)
    return tuple(named)


def _read_call(call: Any, index: int, path: str) -> ToolCall:
    if not isinstance(call, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type: must be 'function'", f"{path}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{path}.function: must be an object", f"{path}.function")
    name, call_id = function.get("name"), call.get("id", f"call_{index}")
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.function.name: must be a string", f"{path}.function.name")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{path}.id: must be a string", f"{path}.id")
    arguments = arguments_text(function.get("arguments"), f"{path}.function.arguments")
    return ToolCall(id=call_id, name=name, arguments=arguments)


PART_SEPARATOR = "\n"
_MEDIA = ("image_url", "image", "input_image", "input_audio", "video_url", "file")
_MEMBERS = {"image_url": ("url", "detail"), "input_audio": ("data", "format")}
"""Members of the parts of media that are read."""


_KNOWN = frozenset(attribute.name for attribute in attrs.fields(MessageBody))
_OF_ROLE = {"reasoning_content": "assistant", "reasoning": "assistant", "tool_call_id": "tool"}
"""Fields that are valid in messages of one role only."""


def read_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Read the messages.

    Raises:
        InvalidRequest: there are none, or a content is invalid.
        UnsupportedParameter: a message contains something that this server does not support.
    """
    if not bodies:
        raise InvalidRequest("messages: must hold at least one message", "messages")
    return with_function_names(_read_message(body, f"messages[{index}]") for index, body in enumerate(bodies))


def find_ignored_in_messages(data: Any) -> Iterator[str]:
    """Yield paths of fields in messages that are unknown or have no effect there."""
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
            kind = part.get("type")
            yield from (f"{path}[{index}].{key}" for key in part if key not in ("type", "compress", kind))
            members = _MEMBERS.get(kind) if isinstance(kind, str) else None
            if members is not None and isinstance(part.get(kind), Mapping):
                yield from (f"{path}[{index}].{kind}.{key}" for key in part[kind] if key not in members)


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
        param=path,
    )


def _read_parts(content: Any, path: str) -> tuple[str | MediaPart, ...]:
    """Read the parts; a string is one part, null none."""
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
    """Return the ranges of the joined content excluded from compression: all, or parts with ``compress: false``."""
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
        raise InvalidRequest(f"{path}.type: must be 'text', 'image_url' or 'input_audio'", f"{path}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{kind}: must be a string", f"{path}.{kind}")
    return text


def read_prediction(value: Any) -> str | None:
    """Return the predicted text, or None. Parts are joined without a separator.

    Raises:
        InvalidRequest: it does not have OpenAI's form.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest("prediction: must be an object", "prediction")
    if value.get("type") != "content":
        raise InvalidRequest("prediction.type: must be 'content'", "prediction.type")
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of text parts", path)
    return "".join(_read_predicted(part, f"{path}[{index}]") for index, part in enumerate(content))


def check_prediction(**others: bool) -> None:
    """Check the rest of the request: field name to True if the field is used in a way incompatible with a prediction.

    Raises:
        UnsupportedParameter: a field is.
    """
    wrong = next((name for name, asks in others.items() if asks), None)
    if wrong is not None:
        raise UnsupportedParameter(f"prediction: not supported together with {wrong}", "prediction")


def find_ignored_in_prediction(value: Any) -> Iterator[str]:
    """Yield paths of unknown members."""
    if isinstance(value, Mapping):
        yield from (f"prediction.{name}" for name in value if name not in ("type", "content"))


def _read_predicted(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{path}.type: must be 'text'", f"{path}.type")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text: must be a string", f"{path}.text")
    text: str = part["text"]
    return text


TEMPLATE_FIELDS = tuple(name for name, row in FIELDS.items() if row.prompt == "template")
"""Fields of a chat request that are read only by its template or that template's parsers."""

_NEUTRAL: tuple[Any, ...] = (None, (), {}, "none", "auto")


def check_raw_prompt(prompt: str, fields: Mapping[str, Any]) -> None:
    """Check the ``prompt`` of a chat request; ``fields`` are its :data:`TEMPLATE_FIELDS`.

    Raises:
        InvalidRequest: it is empty, or a field requires a chat template.
    """
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    for name, value in fields.items():
        if value not in _NEUTRAL:
            raise InvalidRequest(f"{name}: only with messages; no chat template wraps a raw prompt", name)


def read_prompts(prompt: Any, max_prompts: int, *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Return the prompts, each as the keyword argument ``text`` or ``token_ids`` of a request.

    Args:
        may_be_empty: allow an empty text, as before a fill-in-the-middle gap.

    Raises:
        InvalidRequest: it has none of the four forms, or is empty somewhere.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt", may_be_empty)]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt: must be a string, a list of strings, or lists of token ids", "prompt")
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    if _is_id(without_fraction(prompt[0])):
        return [{"token_ids": read_token_ids(prompt, "prompt")}]
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"prompt: at most {max_prompts} prompts are allowed, not {len(prompt)}", "prompt")
    paths = [f"prompt[{index}]" for index in range(len(prompt))]
    if isinstance(prompt[0], str):
        return [_text(item, path, may_be_empty) for path, item in zip(paths, prompt, strict=True)]
    return [{"token_ids": read_token_ids(item, path)} for path, item in zip(paths, prompt, strict=True)]


def read_token_ids(value: Any, path: str, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """Return token ids; their range is checked later, by the model.

    Raises:
        InvalidRequest: it is not a list of whole numbers of at least 0.
    """
    if not isinstance(value, list) or not (value or may_be_empty):
        raise InvalidRequest(f"{path}: must be a list of at least one token id", path)
    if float in set(map(type, value)):
        value = list(map(without_fraction, value))
    for index, token_id in enumerate(value):
        if not _is_id(token_id) or not 0 <= token_id <= INT64_MAX:
            where = f"{path}[{index}]"
            raise InvalidRequest(f"{where}: must be a token id, a whole number from 0 on", where)
    return tuple(value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any, path: str, may_be_empty: bool) -> dict[str, Any]:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}: must be a string, as the prompts before it", path)
    if not (value or may_be_empty):
        raise InvalidRequest(f"{path}: must not be empty", path)
    return {"text": value}
