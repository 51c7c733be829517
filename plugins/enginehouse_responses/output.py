"""Output items while they are written: each knows its events, and its object at any time.

An item is opened, gets text, and is closed, once; its ids are chosen when it opens. The stream and the final response
show the same objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from enginehouse.contract.surface import Chunk, new_id
from enginehouse.contract.types import TokenLogprob

__all__ = ["CallItem", "CustomCallItem", "MessageItem", "OutputItem", "ReasoningItem", "Status"]

Status = Literal["in_progress", "completed", "incomplete"]
_Event = tuple[str, Chunk]
"""Type of an event without ``response.``, and its members besides those that say where it belongs."""


class OutputItem(Protocol):
    """An item of the output."""

    @property
    def id(self) -> str:
        """The id, which never changes."""
        ...

    def to_plain(self) -> Chunk:
        """Return the item as it is now."""
        ...

    def opened(self) -> Iterator[_Event]:
        """Yield the events between ``output_item.added`` and the first text."""
        ...

    def close(self, status: Status) -> Iterator[_Event]:
        """End the item; yields the events before ``output_item.done``."""
        ...


class MessageItem:
    """A message of the assistant, with one part."""

    def __init__(self, *, has_logprobs: bool) -> None:
        self.id = new_id("msg_")
        self._status: Status = "in_progress"
        self._texts: list[str] = []
        self._logprobs: list[Chunk] = []
        self._has_logprobs = has_logprobs
        self._has_part = False

    def opened(self) -> Iterator[_Event]:
        """Begin the part."""
        self._has_part = True
        yield "content_part.added", {"content_index": 0, "part": self._part()}

    def add(self, text: str) -> None:
        """Add text without an event."""
        self._texts.append(text)

    def push(self, text: str, logprobs: tuple[TokenLogprob, ...] | None) -> Iterator[_Event]:
        """Add text."""
        written = [_logprob(one) for one in logprobs or ()] if self._has_logprobs else []
        self._texts.append(text)
        self._logprobs += written
        yield "output_text.delta", {"content_index": 0, "delta": text, "logprobs": written}

    def close(self, status: Status) -> Iterator[_Event]:
        """End the part."""
        self._status = status
        part = self._part()
        yield "output_text.done", {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        yield "content_part.done", {"content_index": 0, "part": part}

    def _part(self) -> Chunk:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def to_plain(self) -> Chunk:
        """Return the message."""
        content = [self._part()] if self._has_part else []
        return {"id": self.id, "type": "message", "status": self._status, "role": "assistant", "content": content}


class ReasoningItem:
    """Reasoning, as its full text; a summary is not made.

    Args:
        seal: returns the opaque form of a text; None if the client does not ask for it.
    """

    def __init__(self, seal: Any = None) -> None:
        self.id = new_id("rs_")
        self._status: Status = "in_progress"
        self._texts: list[str] = []
        self._seal = seal
        self._has_part = False

    def opened(self) -> Iterator[_Event]:
        """Begin the part."""
        self._has_part = True
        yield "content_part.added", {"content_index": 0, "part": self._part()}

    def push(self, text: str) -> Iterator[_Event]:
        """Add text."""
        self._texts.append(text)
        yield "reasoning_text.delta", {"content_index": 0, "delta": text}

    def close(self, status: Status) -> Iterator[_Event]:
        """End the part."""
        self._status = status
        part = self._part()
        yield "reasoning_text.done", {"content_index": 0, "text": part["text"]}
        yield "content_part.done", {"content_index": 0, "part": part}

    def _part(self) -> Chunk:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def to_plain(self) -> Chunk:
        """Return the item; sealed once it is complete."""
        content = [self._part()] if self._has_part else []
        item = {"id": self.id, "type": "reasoning", "status": self._status, "summary": [], "content": content}
        if self._seal is not None and self._status != "in_progress":
            item["encrypted_content"] = self._seal("".join(self._texts))
        return item


class CallItem:
    """A call of a function."""

    def __init__(self, call_id: str, name: str, namespace: str | None) -> None:
        self.id = new_id("fc_")
        self._status: Status = "in_progress"
        self._arguments: list[str] = []
        self._head = {"call_id": call_id, "name": name, **({} if namespace is None else {"namespace": namespace})}

    def opened(self) -> Iterator[_Event]:
        """A call has no parts."""
        yield from ()

    def push(self, arguments: str) -> Iterator[_Event]:
        """Add a fragment of the arguments."""
        if arguments:
            self._arguments.append(arguments)
            yield "function_call_arguments.delta", {"delta": arguments}

    def close(self, status: Status) -> Iterator[_Event]:
        """End the arguments."""
        self._status = status
        yield "function_call_arguments.done", {"arguments": "".join(self._arguments), "name": self._head["name"]}

    def to_plain(self) -> Chunk:
        """Return the call."""
        arguments = "".join(self._arguments)
        return {
            "id": self.id,
            "type": "function_call",
            "status": self._status,
            **self._head,
            "arguments": arguments,
        }


_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PART_OF_OPENING = re.compile(r'\s*(?:\{\s*(?:\}\s*|"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?$')
_TEXT = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}))+')


class CustomCallItem:
    r"""A call of a custom tool, whose model calls a function with one string: the string is read as it arrives.

    Arguments of another form become the input as they are.
    """

    def __init__(self, call_id: str, name: str, namespace: str | None) -> None:
        self.id = new_id("ctc_")
        self._status: Status = "in_progress"
        self._input: list[str] = []
        self._waiting = ""
        self._phase: Literal["opening", "text", "closed", "other"] = "opening"
        self._head = {"call_id": call_id, "name": name, **({} if namespace is None else {"namespace": namespace})}

    def opened(self) -> Iterator[_Event]:
        """A call has no parts."""
        yield from ()

    def push(self, arguments: str) -> Iterator[_Event]:
        """Add a fragment of the function's arguments."""
        self._waiting += arguments
        if self._phase == "opening":
            self._open()
        text = self._read()
        if text:
            self._input.append(text)
            yield "custom_tool_call_input.delta", {"delta": text}

    def _open(self) -> None:
        found = _OPENING.match(self._waiting)
        if found is not None:
            self._phase, self._waiting = "text", self._waiting[found.end() :]
        elif _PART_OF_OPENING.match(self._waiting) is None:
            self._phase = "other"

    def _read(self) -> str:
        """Return the text that is certain now."""
        waiting = self._waiting
        if self._phase == "other":
            self._waiting = ""
            return waiting
        if self._phase != "text":
            return ""
        found = _TEXT.match(waiting)
        taken = "" if found is None else found[0]
        if re.search(r"\\u[dD][89abAB][0-9a-fA-F]{2}$", taken):
            taken = taken[:-6]  # half of a character
        rest = waiting[len(taken) :]
        self._waiting = rest
        if rest.startswith('"'):
            self._phase = "closed"
        return _unescaped(taken)

    def close(self, status: Status) -> Iterator[_Event]:
        """End the input; what was kept back of arguments of another form is added."""
        if self._phase == "opening" and "".join(self._waiting.split()) not in ("", "{", "{}"):
            self._phase = "other"
            yield from self.push("")
        self._status = status
        yield "custom_tool_call_input.done", {"input": "".join(self._input)}

    def to_plain(self) -> Chunk:
        """Return the call."""
        text = "".join(self._input)
        return {"id": self.id, "type": "custom_tool_call", "status": self._status, **self._head, "input": text}


def _unescaped(text: str) -> str:
    """Return part of a JSON string without escapes; one that is malformed is kept as it is."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _logprob(entry: TokenLogprob) -> Chunk:
    def scored(token: bytes, logprob: float) -> Chunk:
        return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}

    alternatives = [scored(top.token, top.logprob) for top in entry.top]
    return {**scored(entry.token, entry.logprob), "top_logprobs": alternatives}
