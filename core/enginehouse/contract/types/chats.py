"""Chats: messages and what stands in them, tools, and how to think."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from attrs import frozen

__all__ = ["Chat", "Image", "MediaPart", "Message", "Thinking", "Tool", "ToolCall", "ToolUse"]


class Chat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat that is not rendered, for engines that take messages; they also find calls and reasoning in answers."""

    messages: tuple[Message, ...]
    tool_use: ToolUse | None = None
    thinking: Thinking | None = None
    template_variables: dict[str, Any] = {}


@frozen(kw_only=True)
class ToolCall:
    """A call in an assistant's message. ``arguments`` is JSON text as the model wrote it, so it may be damaged."""

    id: str
    name: str
    arguments: str


class MediaPart(msgspec.Struct, frozen=True, kw_only=True, tag="media"):
    """A part of a message that is no text, as the client wrote it: unread, so of any form.

    Attributes:
        kind: such as ``image_url``.
        value: what stands under that name in the part.
        param: where the part stands in the request, for errors.
    """

    kind: str
    value: Any
    param: str


class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A checked image. ``media_type`` is what the bytes really are; ``detail`` is how closely to look, if said."""

    media_type: str
    data: bytes
    detail: Literal["auto", "low", "high"] | None = None


@frozen(kw_only=True)
class Message:
    """One chat message. Text parts are already joined; ``name`` is the optional author name.

    Attributes:
        parts: texts and others in their order, where a message holds others; else empty.
        verbatim: ranges of characters of the content that no compressor may touch, as the client says.
        reasoning: what an assistant thought before its content; None when not known.
        tool_calls: the calls of an assistant's message.
        tool_call_id: which call a message of the role ``tool`` answers.
    """

    role: str
    content: str
    name: str | None = None
    parts: tuple[str | MediaPart | Image, ...] = ()
    verbatim: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@frozen(kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of its arguments, an object; without any, it takes no arguments.
        definition: all of it in OpenAI's form, as the client wrote it; templates show this.
        strict: calls of the model's own choice must match ``parameters`` as well.
        param: where the function stands in the request, for errors.
    """

    name: str
    parameters: dict[str, Any]
    definition: dict[str, Any]
    strict: bool = False
    param: str = "tools"


@frozen(kw_only=True)
class ToolUse:
    """The tools of a request and how they may be used.

    Attributes:
        tools: with different names, at least one.
        choice: ``required`` is at least one call, ``none`` hides the tools from the model.
        only: the one function that must be called; with ``required``.
        allowed: names of the functions that may be called; None is all. The model is shown no others.
        parallel: whether one answer may hold several calls; None is what suits the model.
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
    """What a request says about reasoning. None is "not given".

    Attributes:
        enabled: whether the model reasons, where it has the choice.
        budget: most tokens of reasoning; None is no limit.
        effort: how hard to think, for templates that know efforts.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None
