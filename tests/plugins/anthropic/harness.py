"""Bodies of requests, and a call that keeps what it is told."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse_anthropic.body import MessagesBody


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request body; without messages it says "Hi"."""
    return {"max_tokens": 16, "messages": list(messages) or [user("Hi")], **fields}


def user(*content: Any) -> dict[str, Any]:
    """A turn of the user: one string, or blocks."""
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    """A turn of the assistant."""
    return {**user(*content), "role": "assistant"}


def text(said: str, **members: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": said, **members}


def tool_use(name: str = "look", **arguments: Any) -> dict[str, Any]:
    """A call."""
    return {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments}


def tool_result(content: Any = None, **members: Any) -> dict[str, Any]:
    """The result of that call."""
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **members}


LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


@define
class ReadCall:
    """A call whose body is read; lists what has no effect.

    Attributes:
        rejects: unsupported members are refused.
    """

    body: MessagesBody
    rejects: bool = False
    ignored: list[str] = field(factory=list)
    left_out: list[str] = field(factory=list)

    @classmethod
    def of(cls, data: dict[str, Any], rejects: bool = False) -> ReadCall:
        """A call with the body ``data``."""
        return cls(MessagesBody(**{**data, "messages": tuple(data["messages"])}), rejects)

    def ignore(self, path: str) -> None:
        """Note a path."""
        self.ignored.append(path)

    def leave_out(self, path: str, reason: str) -> None:
        """Note a path, or refuse it."""
        if self.rejects:
            raise UnsupportedParameter(f"{path}: {reason}", path)
        self.left_out.append(path)
