"""Messages between the server and its rendering processes: length-prefixed msgspec frames, never pickle."""

from __future__ import annotations

import msgspec

from enginehouse.contract.types import Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt

__all__ = [
    "HEADER_BYTES",
    "CheckTemplate",
    "Checked",
    "Failed",
    "Ready",
    "Remember",
    "Render",
    "Rendered",
    "Reply",
    "Request",
    "pack",
]

HEADER_BYTES = 4
"""Size of the frame length that precedes each frame, an unsigned big-endian number."""


class Remember(msgspec.Struct, frozen=True, array_like=True, tag="remember"):
    """The large, constant parts of prompts, sent once per process; has no reply.

    Attributes:
        key: identifier used by :class:`Render`.
        forget: drop earlier entries.
    """

    key: int
    template: str
    special_tokens: tuple[str, ...]
    forget: bool = False


class Render(msgspec.Struct, frozen=True, array_like=True, tag="render"):
    """Render ``prompt``, whose template and special tokens are the remembered ones."""

    key: int
    prompt: ChatPrompt


class CheckTemplate(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Compile a template."""

    template: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once, when the process can take requests."""


class Rendered(msgspec.Struct, frozen=True, array_like=True, tag="rendered"):
    """Reply to :class:`Render`."""

    segments: tuple[Segment, ...]


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Reply to :class:`CheckTemplate`: the template is valid."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request ended in a RenderError.

    Attributes:
        exhausted: the process ran out of memory and ends.
    """

    message: str
    param: str | None
    exhausted: bool = False


Request = Remember | Render | CheckTemplate
Reply = Ready | Rendered | Checked | Failed

_encode = msgspec.msgpack.Encoder().encode


def pack(frame: Request | Reply) -> bytes:
    """Return the bytes of one frame with its header."""
    data = _encode(frame)
    return len(data).to_bytes(HEADER_BYTES, "big") + data
