"""Answers that are a sequence of messages, each with a header that names its channel and its recipient.

With channels, as gpt-oss writes them (Harmony), ``analysis`` is reasoning, ``commentary`` holds calls, and ``final`` is
the answer. With recipients alone, as Muse writes them, what goes to ``self`` is reasoning, to ``user`` the answer, and
to a function a call. The session separates the messages: it hands reasoning out as such, other texts as they are, and
calls in the form that the tool parsers' format reads.

Source: https://cookbook.openai.com/articles/openai-harmony; written anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from enginehouse.contract.parsers import AnswerText, ChatFormat, ReasoningPart, ReasoningSession, ReasoningText
from enginehouse_parsers.state_reader import StateReader
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag, token_at

__all__ = ["HarmonyReasoningParser", "MessageFormat", "MessageSession", "RecipientsReasoningParser"]

_MESSAGE = "<|message|>"
_LAST = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>")
_ENDS = (*_LAST, "<|start|>assistant", "<|start|>", "<|channel|>")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_NEXT_BEGINNINGS = (*_BEGINNINGS, "assistant")  # the marker before this word is a control token, which may be hidden
_WITHOUT_MARKER = ("to=", "assistant")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)", re.ASCII)
_CHANNEL = re.compile(r"(?:<\|channel\|>)?\s*(analysis|commentary|final)")
_MAX_HEADER_CHARS = 300


class HarmonyReasoningParser:
    """Implements :class:`enginehouse.contract.parsers.ReasoningParser`."""

    name = "harmony"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template writes the channel."""
        return 0.95 if "<|channel|>analysis<|message|>" in model.template else 0.0

    def bind(self, model: ChatFormat) -> MessageFormat:
        """See :class:`enginehouse.contract.parsers.ReasoningParser`."""
        return MessageFormat("<|channel|>analysis<|message|>", "<|end|>", "reasoning_effort", has_channels=True)


class RecipientsReasoningParser:
    """Implements :class:`enginehouse.contract.parsers.ReasoningParser`."""

    name = "recipients"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template writes reasoning as a message to the model itself."""
        return 0.95 if " to=self<|message|>" in model.template else 0.0

    def bind(self, model: ChatFormat) -> MessageFormat:
        """See :class:`enginehouse.contract.parsers.ReasoningParser`."""
        return MessageFormat(" to=self<|message|>", "<|eom|>", "reasoning_strength", has_channels=False)


@frozen
class MessageFormat:
    """Implements :class:`enginehouse.contract.parsers.ReasoningFormat`. A budget ends the message that is reasoning.

    Attributes:
        effort_variable: the template's variable for the effort.
        has_channels: headers name channels; calls are then handed out with a header.
    """

    start: str
    end: str
    effort_variable: str
    has_channels: bool
    has_switch: bool = False

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """Return the effort; these models cannot do without reasoning, so that switched off it is low."""
        if enabled is False:
            effort = "low"
        return {} if effort is None else {self.effort_variable: {"minimal": "low"}.get(effort, effort)}

    def is_open(self, prompt: str) -> bool:
        """True if the prompt ends with the channel's header."""
        return prompt.endswith(self.start)

    def open(self, is_open: bool) -> ReasoningSession:
        """See :class:`enginehouse.contract.parsers.ReasoningFormat`."""
        return MessageSession(is_open, has_channels=self.has_channels)


class MessageSession(StateReader[ReasoningPart]):
    """Implements :class:`enginehouse.contract.parsers.ReasoningSession`. An answer without headers is text.

    Args:
        is_open: the answer begins inside reasoning.
        has_channels: see :class:`MessageFormat`.
    """

    def __init__(self, is_open: bool, *, has_channels: bool) -> None:
        super().__init__()
        self._has_channels = has_channels
        self._beginnings = _BEGINNINGS
        self._is_reasoning = is_open
        self._is_call = False
        self._state = self._body if is_open else self._beginning

    def flush(self, is_cut: bool) -> Sequence[ReasoningPart]:
        """See :class:`enginehouse.contract.parsers.ReasoningSession`."""
        text = self._rest.lstrip()
        if self._state == self._header:  # only what begins without a marker may be no header
            is_text = text.startswith(_WITHOUT_MARKER) and "<|" not in text and not is_cut
        else:
            is_text = not (text.startswith("<") and is_remnant(text, is_cut))
        if is_text:
            self._show(self._rest)
        self._rest = ""
        return self._taken()

    def _beginning(self) -> bool:
        """Before a header, at the start and after each message; an answer in another form has none."""
        start = self._num_white = end_of_white(self._rest, self._num_white, is_json=False)
        text = self._rest[start:]
        if not text or any(begin.startswith(text) and begin != text for begin in self._beginnings):
            return False
        self._num_white = 0
        if text.startswith(self._beginnings):
            self._rest, self._state = text, self._header
        else:
            self._state = self._body
        return True

    def _header(self) -> bool:
        """From the end of a message to the beginning of the next one's content."""
        longest = _MAX_HEADER_CHARS + len(_MESSAGE)
        header, tag, _ = self._rest[:longest].partition(_MESSAGE)
        if not tag and len(self._rest) < longest:
            return False
        self._state = self._body
        if tag:
            self._rest = self._rest[len(header) + len(tag) :]
            self._begin(header)
        else:  # text; without its first marker, which would begin a header again
            self._rest = self._rest[len(token_at(self._rest, 0, _ENDS, is_last=True) or "") :]
        return True

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None else ""
        self._is_call = self._has_channels and name not in ("", "assistant", "user")
        is_analysis = channel is not None and channel[1] == "analysis" and not self._is_call
        self._is_reasoning = is_analysis if self._has_channels else name == "self"
        if self._is_call:
            self._show(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")

    def _body(self) -> bool:
        """The content of a message."""
        shown, tag, rest = split_at_tag(self._rest, _ENDS)
        self._show(shown)
        self._rest = rest
        if tag is None:
            return False
        if self._is_call:
            self._show("<|call|>")
        self._is_call = self._is_reasoning = False
        self._beginnings = _NEXT_BEGINNINGS
        self._state = self._beginning if tag in _LAST else self._header
        if tag == "<|channel|>":
            self._rest = tag + rest
        return True

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningText(text) if self._is_reasoning else AnswerText(text))
