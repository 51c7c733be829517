"""Arguments of earlier tool calls as templates want them: some take an object, some the JSON text.

Used while a template runs. Hugging Face's custom is an object that the template turns into JSON or walks;
other templates write the text as it is. :class:`Arguments` is both.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Arguments", "read_arguments"]

_DAMAGED = "invalid_arguments"


class Arguments(dict[str, Any]):
    """An object that is written, or joined to strings, as the JSON text that it was read from."""

    __slots__ = ("_text",)

    def __init__(self, members: dict[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_arguments(text: str) -> tuple[dict[str, Any], str]:
    """The members of arguments and their JSON text.

    Damaged ones, which models write and clients repeat, become one member that shows the model what it wrote.
    """
    if not text.strip():
        return {}, "{}"
    try:
        members = json.loads(text)
    except (ValueError, RecursionError):
        members = None
    if isinstance(members, dict):
        return members, text
    members = {_DAMAGED: text}
    return members, json.dumps(members, ensure_ascii=False)
