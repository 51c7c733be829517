"""Messages between the server and its rendering processes; see :mod:`enginehouse.workers.ipc` for their frames."""

from __future__ import annotations

import msgspec

from enginehouse.contract.types import Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt

__all__ = [
    "CheckTemplate",
    "Checked",
    "Failed",
    "Ready",
    "Remember",
    "Render",
    "Rendered",
    "Reply",
    "Request",
    "decode_reply",
    "decode_request",
    "encode",
]


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

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Encode the payload of one frame."""
    return _encoder.encode(message)


def decode_request(payload: bytes | bytearray | memoryview) -> Request:
    """Decode a message of the server. Raises msgspec.DecodeError if it is not valid."""
    return _requests.decode(payload)


def decode_reply(payload: bytes | bytearray | memoryview) -> Reply:
    """Decode a message of a rendering process. Raises msgspec.DecodeError if it is not valid."""
    return _replies.decode(payload)
