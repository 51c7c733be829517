"""The part of a call's arguments that can be sent while they are generated, so that the whole is a JSON object.

Models write malformed arguments, and a limit may cut them; clients fail on a stream whose parts are not valid JSON
together. What follows the first mistake is left out, and what is open is closed.
"""

from __future__ import annotations

import json
import re

__all__ = ["PartialObject"]

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_MAX_ESCAPE = len(r"\ud83d\ude00")
_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_MAX_DEPTH = 200
_MAX_SCALAR = 400
"""Longest number that is sent: longer ones are errors of some JSON readers."""


class PartialObject:
    """A JSON object that arrives in pieces.

    Text is held back until it is certain to be part of the object: separators and keys until their value begins,
    numbers and escapes until they are complete.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._held = ""
        self._closers: list[str] = []
        self._in_key = False
        self._token = ""  # of the scalar or the escape that is being read
        self._is_broken = False
        self._read = self._start

    def push(self, text: str) -> str:
        """Return what can be sent now."""
        num_sent = len(self._sent)
        for char in text:
            if self._is_broken:
                break
            self._read(char)
        return "".join(self._sent[num_sent:])

    def finish(self) -> str:
        """Return what completes the object."""
        is_in_string = self._read in (self._string, self._escape) and not self._in_key
        rest = ('"' if is_in_string else "") + "".join(reversed(self._closers))
        if not self._sent:
            rest = "{}"
        self._sent.append(rest)
        self._closers, self._is_broken = [], True
        return rest

    def value(self) -> dict[str, object]:
        """Return the object, once it is finished."""
        value: dict[str, object] = json.loads("".join(self._sent))
        return value

    # -- states: each reads one character ----------------------------------------------------------------

    def _start(self, char: str) -> None:
        if char == "{":
            self._open(char)
        elif char not in _SPACE:
            self._is_broken = True

    def _first(self, char: str) -> None:
        """Read the first key of an object or the first value of an array, or its end."""
        if char == self._closers[-1]:
            self._close(char)
        elif self._closers[-1] == "}":
            self._key(char)
        else:
            self._value(char)

    def _key(self, char: str) -> None:
        self._hold(char)
        if char == '"':
            self._in_key, self._read = True, self._string
        elif char not in _SPACE:
            self._is_broken = True

    def _colon(self, char: str) -> None:
        self._hold(char)
        if char == ":":
            self._read = self._value
        elif char not in _SPACE:
            self._is_broken = True

    def _value(self, char: str) -> None:
        if char in _CLOSERS:
            self._open(char)
        elif char == '"':
            self._send(char)
            self._read = self._string
        elif char in _SPACE:
            self._hold(char)
        elif char in "-0123456789tfn":
            self._token, self._read = char, self._scalar
        else:
            self._is_broken = True

    def _scalar(self, char: str) -> None:
        if char in ",]}" or char in _SPACE:
            if self._token not in ("true", "false", "null") and _NUMBER.fullmatch(self._token) is None:
                self._is_broken = True
                return
            self._send(self._token)
            self._token, self._read = "", self._after
            self._after(char)
        else:
            self._token += char
            self._is_broken = len(self._token) > _MAX_SCALAR

    def _string(self, char: str) -> None:
        if char == "\\":
            self._token, self._read = char, self._escape
            return
        # Models write line breaks into strings, where JSON allows only escapes.
        self._put(json.dumps(char)[1:-1] if char < " " else char)
        if char == '"':
            self._read = self._colon if self._in_key else self._after
            self._in_key = False

    def _escape(self, char: str) -> None:
        self._token += char
        if _ESCAPE.fullmatch(self._token):
            self._put(self._token)
            self._token, self._read = "", self._string
        elif len(self._token) >= _MAX_ESCAPE or (len(self._token) == 2 and char != "u"):
            self._is_broken = True

    def _after(self, char: str) -> None:
        """Read what follows a value."""
        if not self._closers:
            self._is_broken = char not in _SPACE
        elif char == self._closers[-1]:
            self._close(char)
        else:
            self._hold(char)
            if char == ",":
                self._read = self._key if self._closers[-1] == "}" else self._value
            elif char not in _SPACE:
                self._is_broken = True

    # -- what is held and sent ---------------------------------------------------------------------------

    def _hold(self, text: str) -> None:
        self._held += text

    def _send(self, text: str) -> None:
        self._sent.append(self._held + text)
        self._held = ""

    def _put(self, text: str) -> None:
        """Add text of a string: that of a value is sent, that of a key is not yet."""
        (self._hold if self._in_key else self._send)(text)

    def _open(self, char: str) -> None:
        if len(self._closers) >= _MAX_DEPTH:
            self._is_broken = True
            return
        self._send(char)
        self._closers.append(_CLOSERS[char])
        self._read = self._first

    def _close(self, char: str) -> None:
        self._send(char)
        self._closers.pop()
        self._read = self._after
