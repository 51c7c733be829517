"""Channels of gpt-oss (Harmony): ``analysis`` is reasoning, ``commentary`` holds calls, ``final`` is the answer.

An answer is a sequence of messages, each with a header that names its channel and, for a call, its recipient. The
reasoning session separates them: it hands analysis out as reasoning, other texts as they are, and calls in one form,
which the format ``harmony`` of the tool parsers reads.

Source: https://cookbook.openai.com/articles/openai-harmony; written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from enginehouse.contract.parsers import AnswerText, ChatFormat, ReasoningPart, ReasoningSession, ReasoningText
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag, token_at

__all__ = ["HarmonyFormat", "HarmonyReasoningParser", "HarmonySession"]

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant", "<|start|>", "<|channel|>")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_LAST = ("<|end|>", "<|call|>", "<|return|>")
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

    def bind(self, model: ChatFormat) -> HarmonyFormat:
        """See :class:`enginehouse.contract.parsers.ReasoningParser`."""
        return HarmonyFormat()


@frozen
class HarmonyFormat:
    """Implements :class:`enginehouse.contract.parsers.ReasoningFormat`. A budget ends the channel ``analysis``."""

    start: str = "<|channel|>analysis<|message|>"
    end: str = "<|end|>"
    has_switch: bool = False

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """Return the effort; these models cannot do without reasoning, so that switched off it is low."""
        if enabled is False:
            effort = "low"
        return {} if effort is None else {"reasoning_effort": {"minimal": "low"}.get(effort, effort)}

    def is_open(self, prompt: str) -> bool:
        """True if the prompt ends with the channel's header."""
        return prompt.endswith(self.start)

    def open(self, is_open: bool) -> ReasoningSession:
        """See :class:`enginehouse.contract.parsers.ReasoningFormat`."""
        return HarmonySession(is_open)


class HarmonySession:
    """Implements :class:`enginehouse.contract.parsers.ReasoningSession`. An answer without headers is text."""

    def __init__(self, is_open: bool) -> None:
        self._rest = ""  # unread text
        self._num_white = 0  # number of leading white space characters seen so far
        self._parts: list[ReasoningPart] = []
        self._is_reasoning = is_open
        self._is_call = False
        self._state: Callable[[], bool] = self._body if is_open else self._beginning

    def push(self, text: str) -> Sequence[ReasoningPart]:
        """See :class:`enginehouse.contract.parsers.ReasoningSession`."""
        self._rest += text
        while self._rest and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self, is_cut: bool) -> Sequence[ReasoningPart]:
        """See :class:`enginehouse.contract.parsers.ReasoningSession`."""
        text = self._rest.lstrip()
        if self._state == self._header:  # only what begins without a marker may be no header
            is_text = text.startswith("to=") and "<|" not in text and not is_cut
        else:
            is_text = not (text.startswith("<") and is_remnant(text, is_cut))
        if is_text:
            self._show(self._rest)
        self._rest = ""
        parts, self._parts = self._parts, []
        return parts

    def _beginning(self) -> bool:
        """Before a header, at the start and after each message; an answer in another form has none."""
        start = self._num_white = end_of_white(self._rest, self._num_white, is_json=False)
        text = self._rest[start:]
        if not text or any(begin.startswith(text) and begin != text for begin in _BEGINNINGS):
            return False
        self._num_white = 0
        if text.startswith(_BEGINNINGS):
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
        self._is_call = recipient is not None and recipient[1] not in ("assistant", "user")
        self._is_reasoning = channel is not None and channel[1] == "analysis" and not self._is_call
        if self._is_call and recipient is not None:
            self._show(f"<|channel|>commentary to=functions.{recipient[1]} <|constrain|>json<|message|>")

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
        self._state = self._beginning if tag in _LAST else self._header
        if tag == "<|channel|>":
            self._rest = tag + rest
        return True

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(ReasoningText(text) if self._is_reasoning else AnswerText(text))
