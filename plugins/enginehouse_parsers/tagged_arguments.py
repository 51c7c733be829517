"""Reader of arguments that are written one by one between tags, with values without quotation marks."""

from __future__ import annotations

import re

from enginehouse.contract.types import Tool
from enginehouse_parsers.json_schemas import types_of
from enginehouse_parsers.nested_tags import read_nested
from enginehouse_parsers.syntax import KEY, TYPE, ToolSyntax
from enginehouse_parsers.tags import end_of_white, is_remnant, split_at_tag, token_at
from enginehouse_parsers.typed_values import typed
from enginehouse_parsers.value_writer import as_json

__all__ = ["TaggedArguments"]

_MAX_KEY_CHARS = 1000
_PIECES = re.compile(r"\s+|(?<=>)(?=<)")


class TaggedArguments:
    """The arguments of one call, after its name. Texts are handed out while they arrive.

    Args:
        syntax: how arguments are written.
        tool: the function; its schema gives values their types.

    Attributes:
        is_done: what follows does not belong to the arguments.
        is_object: the arguments are one object, which follows.
        out: JSON that was read since this list was emptied by the caller.
    """

    def __init__(self, syntax: ToolSyntax, tool: Tool) -> None:
        self.is_done = self.is_object = False
        self.out: list[str] = []
        self._syntax, self._tool = syntax, tool
        properties = tool.parameters.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._start = syntax.parameter_start.strip()
        self._ends = (*syntax.after_calls, *(marker for marker in syntax.markers if marker != self._start))
        self._num_members = 0
        self._may_be_object = True
        self._is_inside = self._is_text = self._may_pad = False
        self._key = ""
        self._types: set[str] = set()
        self._terminators: tuple[str, ...] = ()
        self._held: list[str] = []  # of a value that is not a text

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Read a text; returns its unread end."""
        goes_on = True
        while goes_on and text and not (self.is_done or self.is_object):
            text, goes_on = self._value(text) if self._is_inside else self._between(text, is_last)
        return text

    def finish(self, rest: str, *, is_cut: bool) -> None:
        """End the arguments where the text ends; ``rest`` is what :meth:`feed` left."""
        if self._is_inside:
            self._add_value("" if is_remnant(rest.lstrip("\n"), is_cut) else rest)
            self._end_value()
        self._close()

    def _close(self) -> None:
        self.is_done = True
        self.out.append("}" if self._num_members else "{}")

    def _between(self, text: str, is_last: bool) -> tuple[str, bool]:
        """Read up to the next argument; returns the rest, and False if more text is needed."""
        text = text[end_of_white(text, 0) :]
        if not text:
            return text, False
        for tags in (self._ends, (self._start,)):
            token = token_at(text, 0, tags, is_last=is_last)
            if token is None:
                return text, False
            if token:
                break
        if token and token != self._start:
            self._close()
            return text, True
        if token:
            return self._name(text, is_last)
        if text[0] == "{" and self._may_be_object:
            self.is_object = True
            return text, True
        self._may_be_object = False
        _, tag, rest = split_at_tag(text, (*self._ends, self._start))
        return (tag or "") + rest, tag is not None

    def _name(self, text: str, is_last: bool) -> tuple[str, bool]:
        """Read the name of an argument and the text before its value."""
        size = len(self._start)
        before, has_type, after = self._syntax.key_end.strip().partition(TYPE)
        first, *more = _PIECES.split(before.strip())
        end = text.find(first, size, size + _MAX_KEY_CHARS)
        found = None
        if end >= 0 and not set(key := text[size:end].strip()) & set("<>\n"):
            type_word = rf"([\w-]*+){re.escape(after)}" if has_type else ""
            pattern = r"\s*+".join(map(re.escape, (first, *more))) + type_word
            found = re.compile(pattern).match(text, end, end + _MAX_KEY_CHARS)
        if found is None:
            if len(text) < size + 2 * _MAX_KEY_CHARS and not is_last:
                return text, False
            return text[size:], True
        self._key = key.strip("\"'")
        self._begin_value(found[1] if has_type else None, before.strip())
        return text[found.end() :], True

    def _begin_value(self, word: str | None, before: str) -> None:
        """Begin a value; ``word`` says its type, ``before`` follows its name."""
        types = types_of(self._properties.get(self._key), self._tool.parameters)
        if word is not None:
            is_text = word == dict(self._syntax.type_words).get("string")
            types = {"string"} if is_text else {*types} - {"string"} or {"number", "object", "array"}
        self._types, self._is_text = types, types == {"string"}
        end = self._syntax.value_end.strip().replace(KEY, self._key)
        others = (f"{self._start}{name}{before}" for name in self._properties if name != self._key)
        self._terminators = tuple(dict.fromkeys((end, *self._syntax.after_calls, *others)))
        self._may_pad = self._syntax.key_end.endswith("\n")
        self.out.append(f"{', ' if self._num_members else '{'}{as_json(self._key)}: ")
        if self._is_text:
            self.out.append('"')
        self._num_members += 1
        self._is_inside, self._may_be_object = True, False

    def _value(self, text: str) -> tuple[str, bool]:
        """Read a value, or a part of it."""
        if self._may_pad:
            self._may_pad = False
            return text.removeprefix("\n"), True
        shown, tag, rest = split_at_tag(text, self._terminators)
        is_padded = self._syntax.value_end.startswith("\n") and shown.endswith("\n")
        self._add_value(shown[:-1] if is_padded else shown)
        if tag is None:
            return ("\n" if is_padded else "") + rest, False
        self._end_value()
        return rest if tag == self._terminators[0] else tag + rest, True

    def _add_value(self, text: str) -> None:
        if not self._is_text:
            self._held.append(text)
        elif text:
            self.out.append(as_json(text)[1:-1])

    def _end_value(self) -> None:
        text, self._held, self._is_inside = "".join(self._held), [], False
        prefix = self._start.removesuffix("<") if KEY in self._syntax.value_end else ""
        if prefix and text.strip().startswith(prefix):
            self.out.append(as_json(read_nested(text, prefix, self._properties.get(self._key))))
        else:
            self.out.append('"' if self._is_text else typed(text, self._types))
