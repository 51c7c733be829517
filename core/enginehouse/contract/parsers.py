"""The contracts of parser plugins: how a model's text shows reasoning and tool calls.

A *parser* recognises models by their chat template. Bound to a model it is a *format*, which says what the
prompt must hold and opens one *session* per choice. Sessions take text in whatever pieces it comes and return
parts; the same text gives the same parts, joined, however it is cut. Streamed and whole answers are made of
these parts. Parsers see text only: they know neither tokens nor wire formats.

A session holds back only what may be markup. It never returns a piece of a tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from attrs import field, frozen

from enginehouse.contract.types import Constraint, Message, Tool

__all__ = [
    "AnswerPart",
    "AnswerText",
    "CallArguments",
    "CallFinished",
    "CallStarted",
    "ChatFormat",
    "PreparedChat",
    "ReasoningFormat",
    "ReasoningParser",
    "ReasoningPart",
    "ReasoningSession",
    "ReasoningText",
    "ToolFormat",
    "ToolParser",
    "ToolPart",
    "ToolSession",
]


@frozen
class ChatFormat:
    """What a parser may know of a model.

    Attributes:
        template: Jinja source of its chat template; foreign code, only ever searched for words.
        special_tokens: control-token string to id.
    """

    template: str
    special_tokens: Mapping[str, int] = field(factory=dict)


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader; not empty."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """Reasoning; not empty."""

    text: str


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """A call of a known function begins; its arguments and its end follow before anything else."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments of the call that is open: JSON text, joined an object if the model wrote one."""

    text: str


class CallFinished(msgspec.Struct, frozen=True, gc=False):
    """The call that is open ends."""


ToolPart = AnswerText | CallStarted | CallArguments | CallFinished
ReasoningPart = AnswerText | ReasoningText
AnswerPart = AnswerText | ReasoningText | CallStarted | CallArguments | CallFinished


@frozen
class PreparedChat:
    """A chat in the form in which the model's template can show it.

    Attributes:
        messages: a message with ``tool_calls`` or of the role ``tool`` only where the template knows these.
        tools: what the template gets as ``tools``; empty where the messages describe them.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class ToolSession(Protocol):
    """Follows one choice's text behind its reasoning."""

    def push(self, text: str) -> Sequence[ToolPart]:
        """What ``text`` makes certain."""
        ...

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """The rest, when the text has ended: a call that is open is finished as it stands.

        Args:
            is_cut: a limit has ended the text, so that a call that had not started is no damaged one.
        """
        ...


class ToolFormat(Protocol):
    """A tool parser bound to a model. Several threads plan chats with it at once: it keeps nothing of them."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that may be control tokens of the model and must be seen in its answers."""
        ...

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """The chat as the template can show it.

        Args:
            messages: the chat; calls and results in it may be damaged, as clients repeat what models wrote.
            tools: what the model may call now; may be empty.
        """
        ...

    def constraint(
        self, tools: Sequence[Tool], parallel: bool | None, answer: Constraint | Literal["any"] | None = None
    ) -> Constraint:
        """What an answer must look like in which every call matches the parameters of its tool.

        Args:
            tools: with at least one.
            parallel: whether several calls are allowed, where the format knows that; None is what suits the model.
            answer: what an answer without a call must look like; None is that there must be a call. ``any`` is
                any text, also in front of the first call; then only tools that are ``strict`` must be matched.

        Raises:
            RequestError: this cannot be expressed.
        """
        ...

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """A session. Whatever calls a function that is not among ``tools`` is text, without its tags."""
        ...


@runtime_checkable
class ToolParser(Protocol):
    """What ``register_tool_parsers`` hands over.

    Attributes:
        name: unique.
    """

    name: str
    api_version: int

    def match(self, model: ChatFormat) -> float:
        """How sure it is that this model calls tools in this way, 0 (not at all) to 1. The surest parser serves."""
        ...

    def bind(self, model: ChatFormat) -> ToolFormat:
        """The format for this model."""
        ...


class ReasoningSession(Protocol):
    """Follows one choice's text from its beginning."""

    def push(self, text: str) -> Sequence[ReasoningPart]:
        """What ``text`` makes certain."""
        ...

    def flush(self, is_cut: bool) -> Sequence[ReasoningPart]:
        """The rest, when the text has ended; ``is_cut``: by a limit."""
        ...


class ReasoningFormat(Protocol):
    """A reasoning parser bound to a model."""

    @property
    def start(self) -> str:
        """The marker that opens reasoning."""
        ...

    @property
    def end(self) -> str:
        """The marker that closes it."""
        ...

    @property
    def has_switch(self) -> bool:
        """Whether the template can be told to start without reasoning."""
        ...

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """Template variables that switch reasoning on or off and say how hard to think; None is "as usual"."""
        ...

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the answer begins with it."""
        ...

    def open(self, is_open: bool) -> ReasoningSession:
        """A session; ``is_open``: the answer begins inside reasoning."""
        ...


@runtime_checkable
class ReasoningParser(Protocol):
    """What ``register_reasoning_parsers`` hands over.

    Attributes:
        name: unique.
    """

    name: str
    api_version: int

    def match(self, model: ChatFormat) -> float:
        """How sure it is that this model marks reasoning in this way, 0 (not at all) to 1. The surest one serves."""
        ...

    def bind(self, model: ChatFormat) -> ReasoningFormat:
        """The format for this model."""
        ...
