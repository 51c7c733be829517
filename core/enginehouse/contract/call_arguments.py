"""Arguments of calls in a client's history, in the forms that clients send; surfaces keep them as JSON text."""

from __future__ import annotations

from typing import Any

import msgspec

from enginehouse.contract.errors import InvalidRequest, quoted

__all__ = ["arguments_text"]

_NOTHING = ("", "null", "[]")  # PHP encodes an empty object as []


def arguments_text(value: Any, path: str) -> str:
    """Return the arguments of a call as text, usually a JSON object.

    Nothing, null and ``[]`` are ``{}``; an object is encoded; text that holds the text of an object is that text. Other
    text is kept even if it is malformed, as models write such calls and clients repeat them.

    Args:
        value: as decoded from the request; None if absent.
        path: of the value in the request, such as ``messages[1].tool_calls[0].function.arguments``.

    Raises:
        InvalidRequest: it is neither an object nor text.
    """
    if value is None or value == []:
        return "{}"
    try:
        if isinstance(value, dict):
            return msgspec.json.encode(value).decode()
        if isinstance(value, str):
            text = value.strip()
            return "{}" if text in _NOTHING else _unquoted(text) or value
    except UnicodeEncodeError:
        raise InvalidRequest(f"{path}: holds a lone surrogate", path) from None
    kind = "a list" if isinstance(value, list) else quoted(value)
    raise InvalidRequest(f"{path}: must be an object, or a string that holds the JSON of one, not {kind}", path)


def _unquoted(text: str) -> str | None:
    """Return the text of an object that was encoded twice."""
    if not text.startswith('"'):
        return None
    try:
        inner = msgspec.json.decode(text, type=str)
        msgspec.json.decode(inner, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return inner
