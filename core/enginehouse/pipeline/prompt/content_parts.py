"""Contents as lists of parts, for templates that read them in no other form.

Templates of models that also see images often iterate over the parts of a content, or read the text of the first one.
Given a text, they would write nothing of it. Which roles need parts is found by rendering short chats, once for each
template. Runs in the rendering process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

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
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "bos_token": "",
        "eos_token": "",
        "add_generation_prompt": False,
    }
    try:
        written = template.render(variables, ["messages"] * len(messages), _MAX_CHARS)
    except TemplateExhausted:
        raise
    except RenderError:
        return False
    return _TEXT in written.casefold() and "'text'" not in written  # the list itself is not its text
