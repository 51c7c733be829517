"""Slash commands of ``enginehouse chat``. Does not know the terminal: text in, text out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from enginehouse_chat.conversation import Conversation

__all__ = ["HELP", "run_command"]

HELP = "/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends."

_LEAVE = ("/exit", "/quit", "/bye")
_ALL = """\
/system TEXT      the system prompt from now on; without TEXT shows it
/set NAME VALUE   a request field, such as: /set temperature 0.2; without NAME shows them, without VALUE forgets it
/reset            forget what was said
/save FILE        write the conversation as JSON, as the API takes it
/exit             end, as Ctrl-D does"""


def run_command(line: str, conversation: Conversation) -> str | None:
    """Execute the line; returns the text to show, or None to leave."""
    name, _, rest = line.partition(" ")
    if name in _LEAVE:
        return None
    command = _COMMANDS.get(name)
    return command(rest.strip(), conversation) if command else f"Unknown command {name}.\n{_ALL}"


def _help(_: str, __: Conversation) -> str:
    return _ALL


def _system(text: str, conversation: Conversation) -> str:
    if text:
        conversation.system = text
    return f"System prompt: {conversation.system or '(none)'}"


def _set(text: str, conversation: Conversation) -> str:
    name, _, value = text.partition(" ")
    if name and value:
        conversation.fields[name] = _value_of(value.strip())
    elif name:
        conversation.fields.pop(name, None)
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in conversation.fields.items())
    return f"Request fields: {fields or '(the defaults)'}"


def _value_of(text: str) -> Any:
    """Parse a value as JSON, otherwise as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _reset(_: str, conversation: Conversation) -> str:
    conversation.reset()
    return "What was said is forgotten."


def _save(text: str, conversation: Conversation) -> str:
    if not text:
        return "Name a file: /save chat.json"
    body = {"model": conversation.model, "messages": conversation.messages, **conversation.fields}
    try:
        Path(text).expanduser().write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{text} cannot be written: {error.strerror}"
    return f"{text} holds {len(conversation.turns)} messages."


_COMMANDS: Mapping[str, Callable[[str, Conversation], str]] = MappingProxyType(
    {"/help": _help, "/system": _system, "/set": _set, "/reset": _reset, "/save": _save}
)
