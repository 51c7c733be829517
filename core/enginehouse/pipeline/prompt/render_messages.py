"""Messages between the server and its rendering processes; see :mod:`enginehouse.workers.ipc` for their frames."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from enginehouse.contract.types import Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt


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


class Decode(msgspec.Struct, frozen=True, array_like=True, tag="decode"):
    """Decode an image file, and shrink it to about ``target_pixels``."""

    data: bytes
    target_pixels: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Sent once, when the process can take requests."""


class Rendered(msgspec.Struct, frozen=True, array_like=True, tag="rendered"):
    """Reply to :class:`Render`."""

    segments: tuple[Segment, ...]


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Reply to :class:`CheckTemplate`: the template is valid."""


class Decoded(msgspec.Struct, frozen=True, array_like=True, tag="decoded"):
    """Reply to :class:`Decode`: ``rgb`` has ``height * width * 3`` bytes."""

    width: int
    height: int
    rgb: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request ended in a RenderError.

    Attributes:
        exhausted: the process ran out of memory and ends.
    """

    message: str
    param: str | None
    exhausted: bool = False


Request = Remember | Render | CheckTemplate | Decode
Reply = Ready | Rendered | Checked | Decoded | Failed

_Payload = bytes | bytearray | memoryview

encode: Callable[[Request | Reply], bytes] = msgspec.msgpack.Encoder().encode
decode_request: Callable[[_Payload], Request] = msgspec.msgpack.Decoder(Request).decode
decode_reply: Callable[[_Payload], Reply] = msgspec.msgpack.Decoder(Reply).decode
