"""The contracts of parser plugins, which find reasoning and tool calls in a model's text.

A *parser* recognises models by their chat template. Bound to a model it is a *format*, which defines what the prompt
must contain and opens one *session* per choice. Sessions accept text in chunks of any size and return parts; the
concatenated parts do not depend on the chunking. Streamed and whole answers are built from these parts. Parsers see
text only: they know neither tokens nor wire formats. A call that takes longer than ``limits.plugin_timeout_s`` is
abandoned: the rest of an answer with tools is then text, and other requests end with an error.

A session holds back only text that may be markup. It never returns part of a tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from attrs import evolve, field, frozen

from enginehouse.contract.types import Constraint, Message, Tool, ToolCall

__all__ = [
    "ANSWER",
    "CALL_IDS",
    "EXAMPLES",
    "EXAMPLE_TOOLS",
    "QUESTION",
    "REASONING",
    "RESULTS",
    "AnswerPart",
    "AnswerText",
    "CallArguments",
    "CallFinished",
    "CallStarted",
    "ChatFormat",
    "Example",
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


QUESTION = "wozu_question"
"""Content of the user's message."""

ANSWER = "wozu_answer"
"""Content of the assistant's message in ``answer`` and ``reasoning``."""

REASONING = "wozu_reasoning"
"""Reasoning in ``reasoning`` and ``reasoned call``."""

RESULTS = ("wozu_result_one", "wozu_result_two")
"""Contents of the results of calls."""

CALL_IDS = ("wozuid001", "wozuid002")
"""Ids of calls: nine letters and digits, as Mistral's templates require."""


@frozen(kw_only=True)
class Example:
    """A chat to be rendered.

    Attributes:
        messages: the chat.
        tools: value of the template's ``tools``.
        variables: further variables of the template.
        opens: end with the beginning of an assistant's turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(factory=dict)
    opens: bool = False


def _tool(name: str, properties: dict[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "wozu_description", "parameters": parameters}
    return Tool(name=name, parameters=parameters, definition={"type": "function", "function": function})


def _typed(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": "wozu_property", **more}


EXAMPLE_TOOLS = (
    _tool(
        "wozu_alpha",
        {
            "key_a": _typed("string"),
            "key_b": _typed("integer"),
            "key_c": _typed("boolean"),
            "key_d": _typed("array", items={"type": "string"}),
            "key_e": _typed("object", additionalProperties=_typed("string")),
            "key_f": _typed("string"),
        },
    ),
    _tool("wozu_beta", {"key_g": _typed("string")}),
    _tool("wozu_gamma", {}),
)
"""The functions that the examples call."""

_VALUES = {
    "key_a": "wert_a",
    "key_b": 31415,
    "key_c": True,
    "key_d": ["wert_d", "wert_dd"],
    "key_e": {"inner": "wert_e"},
    "key_f": "wert_f",
}
_USER = Message(role="user", content=QUESTION)
_SYSTEM = Message(role="system", content="wozu_system")
_ANSWERED = Message(role="assistant", content=ANSWER)
_NEXT = Message(role="user", content="wozu_next")
_THINKS = {"enable_thinking": True, "thinking": True}
_THINKS_NOT = {"enable_thinking": False, "thinking": False}


def _call(number: int, name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=CALL_IDS[number], name=name, arguments=json.dumps(arguments))


_ONE = _call(0, "wozu_alpha", key_a="wert_a")
_TWO = _call(1, "wozu_beta", key_g="wert_g")
_ALL = _call(0, "wozu_alpha", **_VALUES)
_NONE = _call(0, "wozu_gamma")


def _result(number: int, name: str) -> Message:
    return Message(role="tool", content=RESULTS[number], name=name, tool_call_id=CALL_IDS[number])


def _turn(*calls: ToolCall, content: str = "", reasoning: str | None = None) -> Example:
    """Return a chat with an assistant's turn of calls, and their results."""
    results = tuple(_result(number, call.name) for number, call in enumerate(calls))
    assistant = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Example(messages=(_USER, assistant, *results), tools=EXAMPLE_TOOLS)


EXAMPLES: Mapping[str, Example] = {
    "open": Example(messages=(_USER,), opens=True),
    "open with tools": Example(messages=(_USER,), tools=EXAMPLE_TOOLS, opens=True),
    "system and tools": Example(messages=(_SYSTEM, _USER), tools=EXAMPLE_TOOLS, opens=True),
    "open, reasoning on": Example(messages=(_USER,), opens=True, variables=_THINKS),
    "open, reasoning off": Example(messages=(_USER,), opens=True, variables=_THINKS_NOT),
    "answer": Example(messages=(_USER, _ANSWERED, _NEXT), tools=EXAMPLE_TOOLS),
    "call": _turn(_ONE),
    "two calls": _turn(_ONE, _TWO),
    "values": _turn(_ALL),
    "no arguments": _turn(_NONE),
    "answer and call": _turn(_ONE, content=ANSWER),
    "question after a result": evolve(_turn(_ONE), messages=(*_turn(_ONE).messages, _NEXT)),
    "reasoning": Example(messages=(_USER, Message(role="assistant", content=ANSWER, reasoning=REASONING))),
    "reasoned call": _turn(_ONE, reasoning=REASONING),
}
"""The chats by name; a name is a key of ``ChatFormat.examples`` if the template could render its chat."""


@frozen
class ChatFormat:
    """Model data available to parsers.

    Attributes:
        template: Jinja source of its chat template; untrusted code, which is only searched for strings.
        special_tokens: control-token string to id.
        examples: texts that the template writes for the chats of :data:`EXAMPLES`, by name. Empty until the model
            is loaded; a chat that the template refuses is missing.
        failures: messages of the template for those chats, by name.
    """

    template: str
    special_tokens: Mapping[str, int] = field(factory=dict)
    examples: Mapping[str, str] = field(factory=dict, eq=False)
    failures: Mapping[str, str] = field(factory=dict, eq=False)


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """Visible text; not empty."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True, gc=False):
    """Reasoning; not empty."""

    text: str


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """Start of a call of a known function; its arguments and its end follow before any other part."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A fragment of the open call's arguments: JSON text, concatenated an object if the model wrote one."""

    text: str


class CallFinished(msgspec.Struct, frozen=True, gc=False):
    """End of the open call."""


ToolPart = AnswerText | CallStarted | CallArguments | CallFinished
"""Results of a tool parser."""
ReasoningPart = AnswerText | ReasoningText
"""Results of a reasoning parser."""
AnswerPart = AnswerText | ReasoningText | CallStarted | CallArguments | CallFinished
"""Results of all parsers of an answer."""


@frozen
class PreparedChat:
    """A chat in a form that the model's template supports.

    Attributes:
        messages: messages with ``tool_calls`` or of the role ``tool`` only if the template supports these.
        tools: value of the template's ``tools``; empty if the messages describe the tools.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


class ToolSession(Protocol):
    """Incremental parser of one choice's text after its reasoning.

    Calls:
        push: for each piece of text; server, thread of the plugin; under a millisecond.
        flush: at the end of each choice; server, thread of the plugin; under a millisecond.
    """

    def push(self, text: str) -> Sequence[ToolPart]:
        """Add ``text`` and return the parts that are now certain."""
        ...

    def flush(self, is_cut: bool) -> Sequence[ToolPart]:
        """Return the remaining parts at the end of the text; an open call is finished as it is.

        Args:
            is_cut: True if a token limit cut the text: drop a call whose arguments have not started, and a tag that is
                cut after two or more characters.
        """
        ...


class ToolFormat(Protocol):
    """A tool parser bound to a model. Stateless: several threads use it concurrently to prepare chats.

    Calls:
        prepare: for each chat with tools or calls; server, thread of the plugin; milliseconds,
            ``plugin_timeout_s`` at most.
        constraint: for each chat whose calls are enforced; like ``prepare``; milliseconds.
        open: for each choice of a chat with tools; server, thread of the plugin; microseconds.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens of a call, to stay visible in answers; if the tags are ordinary text, only the opening tag."""
        ...

    def prepare(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> PreparedChat:
        """Convert a chat to a form that the template supports.

        Args:
            messages: the chat; calls and results in it may be malformed, because clients repeat what models wrote.
            tools: tools that the model may call now; may be empty.
        """
        ...

    def constraint(
        self, tools: Sequence[Tool], parallel: bool | None, answer: Constraint | Literal["any"] | None = None
    ) -> Constraint:
        """Return a constraint for answers in which every call matches the parameters of its tool.

        Args:
            tools: with at least one.
            parallel: whether several calls are allowed, for formats that support this; None is the model's default.
            answer: constraint of an answer without a call; None means that a call is required. ``any`` is any text,
                also before the first call; then only tools that are ``strict`` must be matched.

        Raises:
            RequestError: this cannot be expressed.
        """
        ...

    def open(self, tools: Sequence[Tool]) -> ToolSession:
        """Open a session. A call of a function that is not among ``tools`` becomes text, without its tags."""
        ...


@runtime_checkable
class ToolParser(Protocol):
    """A tool parser for ``register_tool_parsers``.

    Attributes:
        name: unique.

    Calls:
        match: for each chat template of a model, when it is loaded; server, thread of the plugin; milliseconds.
        bind: for each chat template of a model whose best match it is; server, thread of the plugin; milliseconds.
    """

    name: str
    api_version: int

    def match(self, model: ChatFormat) -> float:
        """Return the confidence, 0 to 1, that this model calls tools in this format; the highest one wins."""
        ...

    def bind(self, model: ChatFormat) -> ToolFormat:
        """Return the format for this model."""
        ...


class ReasoningSession(Protocol):
    """Incremental parser of one choice's text from its beginning.

    Calls:
        push: for each piece of text; server, thread of the plugin; under a millisecond.
        flush: at the end of each choice; server, thread of the plugin; under a millisecond.
    """

    def push(self, text: str) -> Sequence[ReasoningPart]:
        """Add ``text`` and return the parts that are now certain."""
        ...

    def flush(self, is_cut: bool) -> Sequence[ReasoningPart]:
        """Return the remaining parts at the end of the text.

        Args:
            is_cut: True if a token limit cut the text: drop an unfinished marker of two or more characters.
        """
        ...


class ReasoningFormat(Protocol):
    """A reasoning parser bound to a model.

    Calls:
        variables: for each chat; server, thread of the plugin; microseconds.
        is_open: for each rendered chat; like ``variables``; microseconds.
        open: for each choice; server, thread of the plugin; microseconds.
    """

    @property
    def start(self) -> str:
        """The marker that opens reasoning."""
        ...

    @property
    def end(self) -> str:
        """The marker that closes reasoning."""
        ...

    @property
    def has_switch(self) -> bool:
        """True if template variables can turn reasoning off."""
        ...

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """Return template variables that set reasoning on or off and its effort; None is the default.

        Without a switch, ``enabled=False`` may set the lowest effort.
        """
        ...

    def is_open(self, prompt: str) -> bool:
        """True if a rendered prompt ends inside reasoning, so that the answer begins with it."""
        ...

    def open(self, is_open: bool) -> ReasoningSession:
        """Open a session; ``is_open``: the answer begins inside reasoning."""
        ...


@runtime_checkable
class ReasoningParser(Protocol):
    """A reasoning parser for ``register_reasoning_parsers``.

    Attributes:
        name: unique.

    Calls:
        match: for each chat template of a model, when it is loaded; server, thread of the plugin; milliseconds.
        bind: for each chat template of a model whose best match it is; server, thread of the plugin; milliseconds.
    """

    name: str
    api_version: int

    def match(self, model: ChatFormat) -> float:
        """Return the confidence, 0 to 1, that this model marks reasoning in this format; the highest one wins."""
        ...

    def bind(self, model: ChatFormat) -> ReasoningFormat:
        """Return the format for this model."""
        ...
