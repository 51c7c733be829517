r"""Nonce markers: placeholders for control-token strings in untrusted values during template rendering.

Called around each rendering, on the values that come from a client. Each control-token string in them is replaced by
one character, drawn at random for this rendering from Unicode's private planes 15 and 16 among those that no value
contains. A template that slices cannot split a single character; it is not whitespace to strip, and it has no case to
change and no JSON escape. Because it is drawn after all values were read, no client can have written it. After
rendering, each marker becomes an untrusted segment with the text that it replaced.

Two details:

* Values may combine into a control-token string when a template writes one directly after another (``<|im_`` and
  ``end|>``). The end of a value is therefore marked as well if some other value begins with a character that would
  continue a control-token string there.
* Templates search earlier *assistant* messages for reasoning (``content.split('</think>')``). Where a template compares
  with or splits by a control-token string, the caller names it as ``visible`` and it stays in assistant messages. It
  then reaches the model as the control token, as it did when it was generated.

Not covered: a template that builds control-token strings by rewriting user text itself (``lower``, or ``replace`` of a
part in the middle). No known template does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import Segment
from enginehouse.engine.text.segments import ControlStrings

_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_NUM_CODE_POINTS = sum(map(len, _PLANES))


class RequestList(list[Any]):
    """A list of a request, which templates cannot change."""

    __slots__ = ()


class Markers:
    """The markers of one rendering.

    Args:
        control: the model's control-token strings.
        values: all untrusted values of the rendering; plain data, searched for strings.
    """

    def __init__(self, control: ControlStrings, values: Any) -> None:
        self._control = control
        self._strings = [string for string in _strings(values) if string]
        self._text_of: dict[str, str] = {}  # marker to the text it replaces
        self._marker_of: dict[str, str] = {}
        self._used: set[str] | None = None
        self._heads = {stripped[0] for string in self._strings if (stripped := string.lstrip())} if control else set()

    def new(self, text: str) -> str:
        """Return the marker that replaces ``text``; equal texts share one."""
        marker = self._marker_of.get(text)
        if marker is None:
            marker = self._draw()
            self._marker_of[text], self._text_of[marker] = marker, text
        return marker

    def mark(self, value: Any, visible: Collection[str] = ()) -> Any:
        """Return a copy of plain data in which no string contains or begins a control-token string.

        Args:
            value: strings, numbers, lists and dicts; keys of dicts are marked too.
            visible: control-token strings to leave unchanged.
        """
        if isinstance(value, str):
            return self._mark_text(value, visible) if self._control else value
        if isinstance(value, dict):
            return {self.mark(key, visible): self.mark(item, visible) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return RequestList(self.mark(item, visible) for item in value)
        return value

    def restore(self, text: str) -> str:
        """Return ``text`` with every marker replaced by its original text."""
        return "".join(segment.text for segment in self.split(text))

    def split(self, text: str) -> tuple[Segment, ...]:
        """Split rendered text into segments: texts of markers are untrusted, everything else is trusted.

        Adjacent segments of equal trust are merged, so a text without markers is one segment.
        """
        if not self._text_of:
            return (Segment(text, True),) if text else ()
        parts = re.split(f"([{''.join(self._text_of)}])", text)
        restored = ((self._text_of.get(part, part), part not in self._text_of) for part in parts)
        runs = groupby((pair for pair in restored if pair[0]), key=lambda pair: pair[1])
        return tuple(Segment("".join(part for part, _ in run), trusted) for trusted, run in runs)

    def _mark_text(self, text: str, visible: Collection[str]) -> str:
        parts: list[str] = []
        done = 0
        for start, end in self._control.find_all(text):
            if text[start:end] not in visible:
                parts += text[done:start], self.new(text[start:end])
                done = end
        rest = text[done:]
        start, continuations = self._control.unfinished(rest.rstrip())
        if not continuations.isdisjoint(self._heads):
            tail = rest.rstrip()[start:]
            rest = rest[:start] + self.new(tail) + rest[start + len(tail) :]
        return "".join((*parts, rest)) if parts else rest

    def _draw(self) -> str:
        if self._used is None:
            self._used = set().union(*self._strings)
        for _ in range(1000):
            place = secrets.randbelow(_NUM_CODE_POINTS)
            first, second = _PLANES
            marker = chr(first[place] if place < len(first) else second[place - len(first)])
            if marker not in self._used:
                self._used.add(marker)
                return marker
        raise RenderError("The messages use up the private Unicode characters that mark control tokens.", "messages")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
