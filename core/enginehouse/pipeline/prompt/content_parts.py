"""Contents as lists of parts, for templates that read them in no other form.

Templates of models that also see images often iterate over the parts of a content, or read the text of the first one.
Given a text, they would write nothing of it. Which roles need parts is found by rendering short chats, once for each
template. So is the text that a template writes for an image or a recording. Runs in the rendering process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import RenderError
from enginehouse.pipeline.prompt.sandbox import ChatTemplate, TemplateExhausted

_MAX_CHARS = 100_000
_TEXT = "wozu_content"
_CALL = {"id": "wozuid001", "type": "function", "function": {"name": "wozu", "arguments": {}}}
_BEFORE: Mapping[str, tuple[dict[str, Any], ...]] = {
    "user": (),
    "system": (),
    "assistant": ({"role": "user", "content": ""},),
    "tool": ({"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
}
"""Messages before one of each role. Instructions are followed by a question, see :func:`_writes`."""

_PLAIN = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": False}


def as_parts(text: str) -> Sequence[dict[str, str]]:
    """Return a content as a list of one part."""
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=32)
def roles_with_parts(template: ChatTemplate) -> frozenset[str]:
    """Return the roles whose contents the template reads only as lists of parts.

    Raises:
        TemplateExhausted: not enough memory.
    """
    found: frozenset[str] = frozenset()
    for role in _BEFORE:
        if not _writes(template, role, found) and _writes(template, role, found | {role}):
            found |= {role}
        elif not found:  # a template that reads texts of users reads those of all roles
            break
    return found


def _writes(template: ChatTemplate, role: str, in_parts: frozenset[str]) -> bool:
    """True if the template writes the text of a message, with contents of some roles as parts."""
    after = [{"role": "user", "content": ""}] if role == "system" else []
    messages = [
        {**message, "content": as_parts(message["content"])} if message["role"] in in_parts else message
        for message in (*_BEFORE[role], {"role": role, "content": _TEXT, "tool_call_id": _CALL["id"]}, *after)
    ]
    variables = {**_PLAIN, "messages": messages}
    try:
        written = template.render(variables, ["messages"] * len(messages), _MAX_CHARS)
    except TemplateExhausted:
        raise
    except RenderError:
        return False
    return _TEXT in written.casefold() and "'text'" not in written  # the list itself is not its text


@frozen
class MediaForm:
    """The form in which a template takes images or recordings.

    Attributes:
        part: one of them in a content, as the template expects it.
        placeholder: the text that it writes for each.
    """

    part: dict[str, Any]
    placeholder: str

    @property
    def is_text(self) -> bool:
        """True if the template takes the placeholder as text, so that it needs no content in parts."""
        return self.part.get("type") == "text"


_PARTS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "image": ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}),
    "audio": ({"type": "audio"}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
}
_AFTER = "wozu_after"


@lru_cache(maxsize=64)
def media_form(template: ChatTemplate, kind: str) -> MediaForm | None:
    """Return the form of a kind of media; None if the template writes nothing for it, or not the same for each.

    Raises:
        TemplateExhausted: not enough memory.
    """
    without = _with_media(template, ())
    for part in _PARTS[kind] if without is not None else ():
        one, two = _with_media(template, (part,)), _with_media(template, (part, part))
        if one is None or two is None or "'type'" in one:  # the list itself is not its media
            continue
        for placeholder in _inserted(without or "", one):
            if (one.count(placeholder), two.count(placeholder)) == (1, 2):
                return MediaForm(part, placeholder)
    return None


def text_form() -> MediaForm:
    """Return the form for a template without one: a text that no client can have written, between the others."""
    placeholder = f"[{secrets.token_hex(16)}]"
    return MediaForm({"type": "text", "text": placeholder}, placeholder)


def _with_media(template: ChatTemplate, media: Sequence[dict[str, Any]]) -> str | None:
    """Return a message of a user with media between two texts, rendered; None if the template refuses it."""
    content = [*as_parts(_TEXT), *media, *as_parts(_AFTER)]
    variables = {**_PLAIN, "messages": [{"role": "user", "content": content}]}
    try:
        return template.render(variables, ["messages"], _MAX_CHARS)
    except TemplateExhausted:
        raise
    except RenderError:
        return None


def _inserted(without: str, one: str) -> Iterator[str]:
    """Yield the texts that may have been inserted somewhere; there are several if its end equals what precedes it."""
    start = 0
    while start < len(without) and without[start] == one[start : start + 1]:
        start += 1
    end = start + len(one) - len(without)
    while end > start:
        if text := one[start:end].strip():
            yield text
        if not start or one[start - 1] != one[end - 1]:
            return
        start, end = start - 1, end - 1
