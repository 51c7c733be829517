"""Reasoning between tags such as ``<think>`` and ``</think>``, opened by the template or by the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from enginehouse.contract.parsers import (
    ANSWER,
    REASONING,
    AnswerText,
    ChatFormat,
    ReasoningPart,
    ReasoningSession,
    ReasoningText,
)
from enginehouse_parsers.state_reader import StateReader
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag

__all__ = ["ThinkFormat", "ThinkParser", "ThinkSession"]

_PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Known tags, most common first."""

_SWITCHES = ("enable_thinking", "thinking")
_BLANK_LINES = re.compile(r"(?:[ \t\r]*\n)*")


class ThinkParser:
    """Implements ``ReasoningParser``. Finds the tags in what the template writes, in its text, or in the vocabulary."""

    name = "think"
    api_version = 1

    def match(self, model: ChatFormat) -> float:
        """Full confidence if the template mentions the tags."""
        pair = _find_pair(model)
        if pair is None:
            return 0.0
        return 0.9 if _derived(model) or any(tag in model.template for tag in pair) else 0.5

    def bind(self, model: ChatFormat) -> ThinkFormat:
        """Return the format with this model's tags."""
        start, end = _find_pair(model) or _PAIRS[0]
        switches = tuple(name for name in _SWITCHES if _is_variable(name, model.template))
        knows_effort = _is_variable("reasoning_effort", model.template)
        return ThinkFormat(start, end, switches, knows_effort, _wrappers(model, end))


@frozen
class ThinkFormat:
    """Implements :class:`enginehouse.contract.parsers.ReasoningFormat`.

    Attributes:
        switches: template variables that enable reasoning.
        knows_effort: the template uses the reasoning effort.
        wrappers: tags around an answer, which are not part of it.
    """

    start: str
    end: str
    switches: tuple[str, ...] = ()
    knows_effort: bool = False
    wrappers: tuple[str, ...] = ()

    @property
    def has_switch(self) -> bool:
        """See :class:`enginehouse.contract.parsers.ReasoningFormat`."""
        return bool(self.switches)

    def variables(self, enabled: bool | None, effort: str | None) -> dict[str, Any]:
        """See :class:`enginehouse.contract.parsers.ReasoningFormat`."""
        variables: dict[str, Any] = {} if enabled is None else dict.fromkeys(self.switches, enabled)
        if effort is not None and self.knows_effort:
            variables["reasoning_effort"] = effort
        return variables

    def is_open(self, prompt: str) -> bool:
        """True if the prompt ends with the opening tag."""
        return prompt.rstrip().endswith(self.start)

    def open(self, is_open: bool) -> ReasoningSession:
        """See :class:`enginehouse.contract.parsers.ReasoningFormat`."""
        return ThinkSession(self.start, self.end, is_open, self.wrappers)


class ThinkSession(StateReader[ReasoningPart]):
    """Implements :class:`enginehouse.contract.parsers.ReasoningSession`.

    White space around the reasoning and blank lines between it and the answer are dropped. An answer that does not
    begin with the opening tag has no reasoning and is unchanged; the closing tag at its beginning is dropped.
    """

    def __init__(self, start: str, end: str, is_open: bool, wrappers: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._start, self._end, self._wrappers = start, (end,), wrappers
        self._white = list[str]()  # trailing white space of the reasoning so far
        self._has_reasoned = False
        self._state = self._inside if is_open else self._opening

    def push(self, text: str) -> Sequence[ReasoningPart]:
        """See :class:`enginehouse.contract.parsers.ReasoningSession`."""
        if self._state == self._after and not self._wrappers:
            return (AnswerText(text),) if text else ()
        return super().push(text)

    def flush(self, is_cut: bool) -> Sequence[ReasoningPart]:
        """See :class:`enginehouse.contract.parsers.ReasoningSession`."""
        if self._state == self._opening and not is_remnant(self._rest.lstrip(), is_cut):
            self._show(self._rest)
        elif self._state == self._inside and not is_remnant(self._rest, is_cut):
            self._reason(self._rest)
        elif self._state == self._after and not is_remnant(self._rest, is_cut):
            self._show(self._rest)
        self._rest = ""
        return self._taken()

    def _opening(self) -> bool:
        """Only white space and possibly a prefix of a tag so far; the closing tag alone means no reasoning."""
        start = self._num_white = end_of_white(self._rest, self._num_white, is_json=False)
        text = self._rest[start:]
        for tag, state in ((self._start, self._inside), (self._end[0], self._closed)):
            if text.startswith(tag):
                self._rest, self._state, self._num_white = text[len(tag) :], state, 0
                return True
        if self._start.startswith(text) or self._end[0].startswith(text):
            return False
        self._state = self._after
        return True

    def _inside(self) -> bool:
        text, tag, self._rest = split_at_tag(self._rest, self._end)
        self._reason(text)
        if tag is not None:
            self._state = self._closed
        return tag is not None

    def _closed(self) -> bool:
        """After the closing tag: blank lines are dropped until the answer begins."""
        self._num_white = end_of_white(self._rest, self._num_white, is_json=False)
        if self._num_white == len(self._rest):
            return False
        blank = _BLANK_LINES.match(self._rest)
        assert blank is not None
        self._rest, self._state = self._rest[blank.end() :], self._after
        return True

    def _after(self) -> bool:
        shown, tag, self._rest = split_at_tag(self._rest, self._wrappers)
        self._show(shown)
        return tag is not None

    def _reason(self, text: str) -> None:
        """Pass reasoning on, except white space at its beginning and, until more text comes, at its end."""
        kept = text.rstrip()
        if not kept:
            if self._has_reasoned:
                self._white.append(text)
            return
        shown = kept if self._has_reasoned else kept.lstrip()
        self._parts.append(ReasoningText("".join((*self._white, shown))))
        self._white, self._has_reasoned = [text[len(kept) :]], True

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(AnswerText(text))


_MARKER = r"(?:<[^<>\s]+>\w+)?<[^<>\s]+>"
_START = re.compile(rf"({_MARKER}\w*)\s*$")
_END = re.compile(rf"\s*({_MARKER})")
_THINKING = re.compile("think|thought|reason", re.IGNORECASE)


def _derived(model: ChatFormat) -> tuple[str, str] | None:
    """Return the tags that the template writes around reasoning in the examples; None if it writes none."""
    for name in ("reasoning", "reasoned call"):
        before, found, after = model.examples.get(name, "").partition(REASONING)
        start, end = _START.search(before), _END.match(after.partition(ANSWER)[0])
        if found and start is not None and end is not None and _THINKING.search(start[1]):
            return start[1], end[1]
    return None


def _wrappers(model: ChatFormat, end: str) -> tuple[str, ...]:
    """Return the tags that the template writes around an answer after reasoning."""
    after = model.examples.get("reasoning", "").partition(REASONING)[2].partition(end)[2]
    before, found, rest = after.partition(ANSWER)
    opening, closing = _END.fullmatch(before.rstrip()), _END.match(rest)
    return (opening[1], closing[1]) if found and opening is not None and closing is not None else ()


def _find_pair(model: ChatFormat) -> tuple[str, str] | None:
    derived = _derived(model)
    if derived is not None:
        return derived
    in_template = [pair for pair in _PAIRS if any(tag in model.template for tag in pair)]
    in_vocabulary = [pair for pair in _PAIRS if set(pair) <= model.special_tokens.keys()]
    return next(iter((*in_template, *in_vocabulary)), None)


def _is_variable(name: str, template: str) -> bool:
    """True if a statement or expression of the template uses ``name``; prose and string literals do not count."""
    code = re.findall(r"\{[%{](.*?)[%}]\}", template, flags=re.DOTALL)
    outside_texts = (re.sub(r"'[^']*'|\"[^\"]*\"", "", piece) for piece in code)
    return any(re.search(rf"(?<![.\w]){name}\b", piece) for piece in outside_texts)
