"""Incremental reader of values as models write them, which hands out JSON.

Valid JSON passes through unchanged. What is plainly meant otherwise is written as JSON: Python literals, single and
missing quotes, raw line breaks and unescaped quotes in texts, trailing and missing commas, comments, missing or wrong
brackets, keyword arguments in parentheses. What was handed out and :meth:`LooseValue.finish` always form a valid value.

Uses a stack instead of recursion, so that deep nesting costs memory only.
"""

from __future__ import annotations

import re

from enginehouse_parsers.loose_text import MORE, TextReader
from enginehouse_parsers.loose_words import json_of_word
from enginehouse_parsers.value_writer import END_OF_MEMBER, Container

__all__ = ["LooseValue"]

_WHITE = re.compile(r"\s+")
_WORD_STOPS = re.compile(r"[,\]\})\n(<`\[]|\"")
_KEY_STOPS = re.compile(r"[\s:=,{}\[\]()'\"<]")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_LONGEST_NUMBER = 40
_COMMENTS = {"//": "\n", "/*": "*/", "#": "\n"}


class LooseValue(TextReader):
    """One value, from its first character on: an object, a list, or anything else if it is read to :meth:`finish`.

    Args:
        ends: markers after the value; outside texts they end it.
        quotes: quotation marks besides the usual ones.
        positions: names of arguments in parentheses that are given without one.
        splits: hand the members of the outermost object out one by one, between a :class:`Member` and
            :data:`END_OF_MEMBER`, without the text around them.

    Attributes:
        is_done: the value is complete.
        out: what was read since this list was emptied by the caller.
    """

    def __init__(
        self,
        ends: tuple[str, ...] = (),
        quotes: tuple[str, ...] = (),
        positions: tuple[str, ...] = (),
        *,
        splits: bool = False,
    ) -> None:
        super().__init__(ends, quotes, positions, splits=splits)
        self.is_done = False
        self._state = self._value
        self._word: list[str] = []
        self._word_size = self._word_depth = 0
        self._comment = ""
        self._after_comment = self._state

    def feed(self, text: str, start: int = 0, *, is_last: bool = False) -> int:
        """Read ``text`` from ``start``.

        Returns:
            The position where reading stopped: the value is done, or more text is needed to read what follows. The
            caller gives the rest again, together with more.
        """
        self._is_last = is_last
        index, end = start, len(text)
        while index < end and not self.is_done:
            following = self._state(text, index)
            if following == MORE:
                break
            if self._doubt is not None:
                self._raw.append(text[index:following])
            index = following
        return index

    def finish(self, rest: str = "") -> str:
        """End the value where the text ends; ``rest`` is what :meth:`feed` left.

        Returns:
            Text that turned out to follow the value.
        """
        rest = rest[self.feed(rest, is_last=True) :] if rest else ""
        left = ""
        if not self.is_done:
            if self._doubt is not None:
                if self._state == self._closing:
                    self.out += self._doubt
                else:
                    left = "".join(self._raw)
                self._doubt = None
            self._end_all()
        return left + rest

    def _end_all(self) -> None:
        self._end_state()
        while self._stack:
            self._pop()
        self.is_done = True

    # -- between values ----------------------------------------------------------------------------

    def _between(self, text: str, index: int) -> int | None:
        """Read white space, comments and end markers; None if something else follows."""
        char = text[index]
        if char.isspace():
            found = _WHITE.match(text, index)
            assert found is not None
            self._space(found[0])
            return found.end()
        if char == "/" and len(text) == index + 1 and not self._is_last:
            return MORE
        opening = text[index : index + 2] if char == "/" else char
        if opening in _COMMENTS and (char == "/" or self._state != self._value):  # a value may be a colour
            self._comment, self._after_comment = _COMMENTS[opening], self._state
            self._state = self._in_comment
            return index + len(opening)
        return self._at_end(text, index)

    def _between_members(self, text: str, index: int) -> int | None:
        """Read what may be between values, and a closing bracket; None if something else follows."""
        following = self._between(text, index)
        if following is None and text[index] in "}])":
            return self._close(text[index], index)
        return following

    def _at_end(self, text: str, index: int) -> int | None:
        """End the value before an end marker; None if there is none."""
        for marker in self._ends:
            if text.startswith(marker, index):
                self._end_all()
                return index
            if not self._is_last and marker.startswith(text[index:]):
                return MORE
        return None

    def _in_comment(self, text: str, index: int) -> int:
        found = text.find(self._comment, index)
        if found < 0:
            cut = len(text) - (self._comment == "*/" and text.endswith("*"))
            return cut if cut > index else MORE
        self._state = self._after_comment
        return found + len(self._comment)

    def _value(self, text: str, index: int) -> int:  # noqa: PLR0911 - one per kind of value
        quote = self._quote_at(text, index)
        if quote is None:
            return MORE
        if quote:
            return self._open_string(text, index, quote)
        following = self._between(text, index)
        if following is not None:
            return following
        char = text[index]
        if char in "rfbu" and self._is_in_call:  # the prefix of a text in Python
            if len(text) == index + 1 and not self._is_last:
                return MORE
            if text[index + 1 : index + 2] in ("'", '"'):
                return index + 1
        if char in "{[":
            return self._push(char, index)
        if char == "(":
            return self._push_tuple(index)
        if char in ",}])":
            return self._no_value(char, index)
        self._begin_item()
        self._word, self._word_size, self._word_depth, self._state = [], 0, 0, self._in_word
        return index

    def _push(self, char: str, index: int) -> int:
        self._begin_item()
        is_object = char == "{"
        self._bracket(char)
        self._stack.append(Container(_CLOSERS[char], _CLOSERS[char], is_object))
        self._state = self._in_object if is_object else self._value
        return index + 1

    def _push_tuple(self, index: int) -> int:
        """A tuple, or at the beginning keyword arguments."""
        self._begin_item()
        is_call = not self._stack
        self._bracket("{" if is_call else "[")
        self._stack.append(Container(")", "}" if is_call else "]", is_object=is_call, is_call=is_call))
        self._state = self._in_object if is_call else self._value
        return index + 1

    def _no_value(self, char: str, index: int) -> int:
        """A comma or a closing bracket where a value should be."""
        if not self._stack:
            return index + 1
        if self._stack[-1].is_object:  # after a colon
            self._begin_item()
            self._emit("null")
            self._complete()
            return index
        if char == ",":
            return index + 1
        return self._close(char, index)

    def _in_object(self, text: str, index: int) -> int:  # noqa: PLR0911
        """Before a key."""
        quote = self._quote_at(text, index)
        if quote is None:
            return MORE
        if quote:
            self._key, self._key_is_quoted, self._quote = [], True, quote
            self._is_python, self._state = quote != '"', self._in_string
            return index + len(quote)
        following = self._between_members(text, index)
        if following is not None:
            return following
        char, top = text[index], self._stack[-1]
        if char == ",":
            return index + 1
        if char == "*" and (top.is_call or not self._has_members):  # members of a call as an object are not spread
            if len(text) < index + 2 and not self._is_last:
                return MORE
            self._state = self._in_spread
            return index + 2
        if top.is_call and char in "[{(-0123456789":
            self._write_key(self._next_position())
            self._state = self._value
            return index
        if char in "[{(:=":
            return index + 1
        self._key, self._key_is_quoted, self._state = [], False, self._in_key
        return index

    def _in_spread(self, text: str, index: int) -> int:
        """After two stars: the object whose members are arguments."""
        following = self._between(text, index)
        if following is not None:
            return following
        if text[index] == "{":
            self._stack.append(Container("}", "", is_object=True, is_spread=True))
            self._state = self._in_object
            return index + 1
        self._state = self._in_object
        return index

    def _in_key(self, text: str, index: int) -> int:
        """Inside a key without quotes."""
        assert self._key is not None
        found = _KEY_STOPS.search(text, index)
        end = len(text) if found is None else found.start()
        if end > index:
            self._key.append(text[index:end])
            return end
        if text[index] != "<":
            self._state = self._colon
            return index
        following = self._at_end(text, index)
        if following is not None:
            return following
        self._key.append("<")
        return index + 1

    def _colon(self, text: str, index: int) -> int:
        """Between key and value."""
        char, top = text[index], self._stack[-1]
        if char.isspace():
            found = _WHITE.match(text, index)
            assert found is not None
            return found.end()
        assert self._key is not None
        if char in ":=":
            self._write_key(self._key_text())
            self._key, self._state = None, self._after_colon
            return index + 1
        following = self._at_end(text, index)
        if following is not None:
            return following
        if char in ",}])":
            if top.is_call:
                self._positional()
            else:
                self._write_key(self._key_text())
                self._key = None
                self._emit("null")
                self._complete()
            return index
        self._write_key(self._key_text())
        self._key, self._state = None, self._value
        return index

    def _after_colon(self, text: str, index: int) -> int:
        """The rest of ``:=``, ``=>`` or ``==``."""
        self._state = self._value
        return index + (text[index] in "=>:")

    def _after(self, text: str, index: int) -> int:
        """After a value inside a container."""
        following = self._between_members(text, index)
        if following is not None:
            return following
        char, top = text[index], self._stack[-1]
        self._state = self._in_object if top.is_object else self._value
        if char in ",;":
            self._comma = True
            return index + 1
        return index + (char in ":=")

    def _close(self, char: str, index: int) -> int:
        """Close the innermost container with this bracket, and those inside it; without one, skip the bracket."""
        if not any(container.closer == char for container in self._stack):
            return index + 1
        while self._stack[-1].closer != char:
            self._pop()
        self._pop()
        return index + 1

    def _pop(self) -> None:
        self._comma = False
        gap, self._gap = "".join(self._gap), []
        self._space(gap)
        container = self._stack.pop()
        self._bracket(container.written)
        if container.is_spread:
            self._state = self._after
        else:
            self._complete()

    # -- words -------------------------------------------------------------------------------------

    def _in_word(self, text: str, index: int) -> int:
        """Inside a number, a literal, or a text without quotes."""
        found = _WORD_STOPS.search(text, index)
        stop = len(text) if found is None else found.start()
        if stop > index:
            self._word.append(text[index:stop])
            self._word_size += stop - index
            return stop
        char = text[stop]
        if char in "(" or (char == ")" and self._word_depth):
            self._word_depth += 1 if char == "(" else -1
        elif char in "<`":
            following = self._at_end(text, index)
            if following is not None:
                return following
        elif char == '"' and self._word_size < _LONGEST_NUMBER and json_of_word("".join(self._word))[:1] != '"':
            self._end_word()  # a comma is missing after a number or a literal
            return index
        elif char in '["' or (self._word_depth and char != "\n"):
            pass
        else:
            self._end_word()
            return index
        self._word.append(char)
        self._word_size += 1
        return index + 1

    def _end_word(self) -> None:
        self._emit(json_of_word("".join(self._word)))
        self._word = []
        self._complete()

    # -- ends of values ---------------------------------------------------------------------------

    def _positional(self) -> None:
        """Write what was read as a key as an argument without a name."""
        key, self._key = self._key_text(), None
        self._write_key(self._next_position())
        self._emit(f'"{key}"' if self._key_is_quoted else json_of_word(key))
        self._complete()

    def _complete(self) -> None:
        """End a value: the outermost one, or one inside a container."""
        self._state = self._after
        if not self._stack:
            self.is_done = True
        elif self._has_members:
            self.out.append(END_OF_MEMBER)

    def _end_state(self) -> None:
        """End what is being read."""
        if self._state == self._in_comment:
            self._state = self._after_comment
        if self._key is not None:
            if self._state == self._colon and self._stack[-1].is_call:
                self._positional()
            self._key = None  # a key without a value
        elif self._state in (self._in_string, self._closing):
            self._gap = []
            self._emit('"')
            self._complete()
        elif self._state == self._in_word:
            self._end_word()
        elif self._state in (self._value, self._after_colon) and (not self._stack or self._stack[-1].is_object):
            self._emit("null")
            self._complete()
        self._gap = []
