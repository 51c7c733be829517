"""Messages between the server and its rendering processes: msgspec frames, length first, never pickle."""

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
"""Each frame follows its length, an unsigned big-endian number."""


class Remember(msgspec.Struct, frozen=True, array_like=True, tag="remember"):
    """The large, unchanging parts of prompts, sent once per process; has no reply.

    Attributes:
        key: how :class:`Render` refers to them.
        forget: drop what was remembered before.
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
    """The answer to :class:`Render`."""

    segments: tuple[Segment, ...]


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """The answer to :class:`CheckTemplate`: the template is valid."""


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
    """The bytes of one frame with its header."""
    data = _encode(frame)
    return len(data).to_bytes(HEADER_BYTES, "big") + data
