"""Chats: messages and their parts, tools, and reasoning options."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from attrs import field, frozen
from msgspec.structs import replace

__all__ = [
    "Chat",
    "DecodedAudio",
    "DecodedImage",
    "DecodedMedia",
    "Image",
    "MediaPart",
    "Message",
    "Thinking",
    "Tool",
    "ToolCall",
    "ToolUse",
]


class Chat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat that is not rendered, for engines that take messages and parse tool calls and reasoning themselves."""

    messages: tuple[Message, ...]
    tool_use: ToolUse | None = None
    thinking: Thinking | None = None
    template_variables: dict[str, Any] = {}


@frozen(kw_only=True)
class ToolCall:
    """A call in an assistant's message. ``arguments`` is JSON text as the model wrote it, possibly malformed."""

    id: str
    name: str
    arguments: str


class MediaPart(msgspec.Struct, frozen=True, kw_only=True, tag="media"):
    """A non-text part of a message as the client wrote it, not validated.

    Attributes:
        kind: such as ``image_url``.
        value: value of that key in the part.
        param: path of the part in the request, for errors.
    """

    kind: str
    value: Any
    param: str


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A validated image. ``media_type`` is the detected type; ``detail`` is the requested resolution, if given."""

    media_type: str
    data: bytes
    detail: Literal["auto", "low", "high"] | None = None


class DecodedImage(msgspec.Struct, frozen=True, tag="pixels"):
    """The pixels of an image, upright, of the first frame, without transparency.

    Attributes:
        digest: SHA-256 of the bytes of its file, in hex.
        width: pixels of a row.
        height: number of rows.
        rgb: ``height * width * 3`` bytes, row by row.
        max_tokens: tokens that it may have; None is the model's usual number. Models whose images always have the same
            number ignore it.
        param: path of the image in the request, for errors.
    """

    digest: str
    width: int
    height: int
    rgb: bytes
    max_tokens: int | None = None
    param: str = ""

    @property
    def kind(self) -> Literal["image", "audio"]:
        """Its kind of media."""
        return "image"

    @property
    def data(self) -> bytes:
        """The pixels."""
        return self.rgb

    def with_data(self, data: bytes) -> DecodedImage:
        """Return the image with other pixels."""
        return replace(self, rgb=data)


class DecodedAudio(msgspec.Struct, frozen=True, tag="samples"):
    """A recording as samples of one channel.

    Attributes:
        digest: SHA-256 of the bytes of its file, in hex.
        rate: samples of a second.
        samples: float32 in the byte order of the machine, from -1 to 1.
        param: path of the recording in the request, for errors.
    """

    digest: str
    rate: int
    samples: bytes
    param: str = ""

    @property
    def kind(self) -> Literal["image", "audio"]:
        """Its kind of media."""
        return "audio"

    @property
    def data(self) -> bytes:
        """The samples."""
        return self.samples

    def with_data(self, data: bytes) -> DecodedAudio:
        """Return the recording with other samples."""
        return replace(self, samples=data)


DecodedMedia = DecodedImage | DecodedAudio
"""What a prompt may contain besides text."""


@frozen(kw_only=True)
class Message:
    """One chat message. Text parts are already joined; ``name`` is the optional author name.

    Attributes:
        parts: texts and other parts in their order, if there are other parts; else empty.
        verbatim: character ranges of the content that compressors must not change, as given by the client.
        reasoning: an assistant's reasoning before its content; None if unknown.
        tool_calls: the calls of an assistant's message.
        tool_call_id: id of the call that a message of the role ``tool`` answers.
        param: path of the message in the request, for errors; "" for a message that the client did not write.
    """

    role: str
    content: str
    name: str | None = None
    parts: tuple[str | MediaPart | Image | DecodedImage | DecodedAudio, ...] = ()
    verbatim: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    param: str = field(default="", eq=False)


_DECLARE_MEMBERS = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties")


@frozen(kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of its arguments, an object, as the client wrote it.
        definition: the complete tool in OpenAI's format, as the client wrote it; used by templates.
        strict: ``parameters`` are enforced also for calls that the model makes of its own choice.
        param: path of the function in the request, for errors.
    """

    name: str
    parameters: dict[str, Any]
    definition: dict[str, Any]
    strict: bool = False
    param: str = "tools"

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """JSON Schema to enforce: an object, without undeclared members unless ``parameters`` asks for them."""
        schema = {"type": "object", **self.parameters}
        if "additionalProperties" not in schema and not any(keyword in schema for keyword in _DECLARE_MEMBERS):
            schema["additionalProperties"] = False
        return schema


@frozen(kw_only=True)
class ToolUse:
    """The tools of a request and how they may be used.

    Attributes:
        tools: at least one, with distinct names.
        choice: ``required`` demands at least one call, ``none`` hides the tools from the model.
        only: the one function that must be called; only with ``required``.
        allowed: names of the functions that may be called; None is all. Others are not shown to the model.
        parallel: whether one answer may contain several calls; None is the model's default.
    """

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: frozenset[str] | None = None
    parallel: bool | None = None

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        return tuple(
            tool
            for tool in self.tools
            if self.only in (None, tool.name) and (self.allowed is None or tool.name in self.allowed)
        )


@frozen(kw_only=True)
class Thinking:
    """Reasoning options of a request. None is "not given".

    Attributes:
        enabled: turns reasoning on or off, if the model supports it.
        budget: maximum number of reasoning tokens; None means no limit.
        effort: reasoning effort, for templates that support it.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None
