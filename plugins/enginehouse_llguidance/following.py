"""Follows JSON as it is written, and says which of its values are wrong: what a grammar does not express.

States are immutable, so that going back means to take an earlier one. Does not know tokens or masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from enginehouse_llguidance.partial import next_texts, wrong_end
from enginehouse_llguidance.schemas.validation import Rules
from enginehouse_llguidance.schemas.values import key_of

__all__ = ["ENDS_OF_SCALARS", "START", "JsonState", "WrongValue", "check_whole", "follow", "held_from", "next_of"]

ENDS_OF_SCALARS = (b",", b"]", b"}")
_SCALAR = frozenset(b"0123456789.+-eEtrufalsn")


class WrongValue(Exception):
    """A value is wrong.

    Attributes:
        beginnings: no text may begin with one of these.
        num_evaluated: pairs of a schema and a part of the value that it took to find out.
    """

    def __init__(self, *beginnings: bytes, num_evaluated: int = 0) -> None:
        super().__init__("a value is wrong")
        self.beginnings = beginnings
        self.num_evaluated = num_evaluated


class _Open(NamedTuple):
    """An array or object that is being written.

    Attributes:
        places: schemas that always apply to it.
        begin: index of its first byte in the text.
        end: index after the last complete item.
        value: index of the value in progress, or -1.
        keys: of the items or names so far, if they must differ.
    """

    is_array: bool
    places: frozenset[str]
    begin: int
    end: int
    differs: bool
    index: int = 0
    value: int = -1
    name: str = ""
    expects_name: bool = False
    keys: frozenset[Any] = frozenset()


class JsonState(NamedTuple):
    """State after a text.

    Attributes:
        string: index of the string in progress, or -1.
        root: index of the whole value, or -1 before its begin.
    """

    open: tuple[_Open, ...] = ()
    string: int = -1
    is_escaped: bool = False
    root: int = -1
    is_complete: bool = False


START = JsonState()


def follow(state: JsonState, text: bytearray, begin: int, rules: Rules) -> tuple[JsonState, int]:
    """Follow a text of which the first ``begin`` bytes were followed before; return the state and the index reached.

    The index is less than the length of the text if the whole value is complete.

    Raises:
        WrongValue: a value that is now complete.
    """
    index = begin
    size = len(text)
    while index < size and not state.is_complete:
        byte = text[index]
        if state.string >= 0:
            if state.is_escaped:
                state = state._replace(is_escaped=False)
            elif byte == 0x5C:
                state = state._replace(is_escaped=True)
            elif byte == 0x22:
                state = _after_string(state, text, index, rules)
            else:
                index = _plain_until(text, index, size)
                continue
        elif not state.open and state.root >= 0 and byte not in _SCALAR:
            return _complete(state, text, state.root, index, rules), index
        else:
            state = _outside(state, text, index, byte, rules)
        index += 1
    if rules.is_guided:
        for places, first in _in_progress(state, rules):
            if (end := wrong_end(text, first, begin, places, rules)) is not None:
                raise WrongValue(bytes(text[:end]))
    return state, index


def next_of(state: JsonState, text: bytearray, rules: Rules) -> list[bytes] | None:
    """Return texts, one of which the rest of a text begins, or begins with; None if that is not known."""
    for places, begin in _in_progress(state, rules) if rules.is_guided else ():
        if (found := next_texts(text, begin, places, rules)) is not None:
            return found
    return None


def _in_progress(state: JsonState, rules: Rules) -> Iterator[tuple[frozenset[str], int]]:
    """Yield the partial values: the schemas that always apply to them, and their indices."""
    yield from ((one.places, one.begin) for one in state.open)
    begin = _begin_of_scalar(state)
    if begin >= 0:
        yield _places(state, rules), begin
    elif state.string >= 0:
        yield frozenset(f"{one}/propertyNames" for one in state.open[-1].places), state.string


def _begin_of_scalar(state: JsonState) -> int:
    """Return the index of the string, number or name in progress, or -1."""
    return state.open[-1].value if state.open else -1 if state.is_complete else state.root


def check_whole(state: JsonState, text: bytearray, rules: Rules) -> None:
    """Check a number, or a name such as ``true``, that the end of the text completes.

    Raises:
        WrongValue: it is wrong.
    """
    if not state.open and not state.is_complete and state.root >= 0:
        try:
            _complete(state, text, state.root, len(text), rules)
        except WrongValue as found:
            raise WrongValue(bytes(text), num_evaluated=found.num_evaluated) from None


def held_from(state: JsonState, size: int, rules: Rules) -> int | None:
    """Return the index from which a text of ``size`` bytes may still turn out wrong; None if all of it is final."""
    for one in state.open:
        if one.places & rules.checked or (one.differs and one.places & rules.scarce):
            return one.begin
        if one.differs and one.index and (one.end < size or one.value >= 0):
            return one.end
    begin = _begin_of_scalar(state)
    return begin if begin >= 0 and _places(state, rules) & rules.checked else None


def _plain_until(text: bytearray, index: int, size: int) -> int:
    """Return the index of the next byte in a string with a meaning."""
    ends = [end for end in (text.find(b'"', index), text.find(b"\\", index)) if end >= 0]
    return min(ends, default=size)


def _places(state: JsonState, rules: Rules) -> frozenset[str]:
    """Return the schemas that always apply to the value in progress, or about to begin."""
    if not state.open:
        return rules.root
    top = state.open[-1]
    return rules.validator.step(top.places, top.index if top.is_array else top.name)


def _with_top(state: JsonState, **changes: Any) -> JsonState:
    return state._replace(open=(*state.open[:-1], state.open[-1]._replace(**changes)))


def _begin(state: JsonState, index: int) -> JsonState:
    """Note the begin of a value."""
    if not state.open:
        return state if state.root >= 0 else state._replace(root=index)
    return state if state.open[-1].value >= 0 else _with_top(state, value=index)


def _outside(state: JsonState, text: bytearray, index: int, byte: int, rules: Rules) -> JsonState:
    if byte in b"{[":
        places = _places(state, rules)
        is_array = byte == 0x5B
        differs = not places.isdisjoint(rules.unique if is_array else rules.names)
        state = _begin(state, index)
        one = _Open(is_array, places, index, index + 1, differs, expects_name=not is_array)
        return state._replace(open=(*state.open, one))
    if byte in b"}],":
        top = state.open[-1]
        if top.value >= 0:
            state = _complete(state, text, top.value, index, rules)
        if byte == 0x2C:
            _check_room(state.open[-1], text, index, rules)
            return _with_top(state, end=index, expects_name=not top.is_array)
        state = state._replace(open=state.open[:-1])
        begin = state.open[-1].value if state.open else state.root
        return _complete(state, text, begin, index + 1, rules)
    if byte == 0x22:
        is_name = bool(state.open) and state.open[-1].expects_name
        if is_name:
            _check_room(state.open[-1], text, index, rules)
        return (state if is_name else _begin(state, index))._replace(string=index)
    if byte in b" :\t\r\n":
        return state
    return _begin(state, index)


def _check_room(top: _Open, text: bytearray, index: int, rules: Rules) -> None:
    """Raise WrongValue if the byte at ``index`` begins one member more than an object may have."""
    asked = () if top.is_array else top.places & rules.checked
    if any(top.index >= rules.validator.most_members(one) for one in asked):
        raise WrongValue(bytes(text[: index + 1]))


def _after_string(state: JsonState, text: bytearray, index: int, rules: Rules) -> JsonState:
    begin, state = state.string, state._replace(string=-1)
    if not state.open or not state.open[-1].expects_name:
        return _complete(state, text, begin, index + 1, rules)
    top = state.open[-1]
    name = json.loads(text[begin : index + 1])
    is_wrong = top.differs and (name in top.keys or not rules.validator.has_room(top.places, top.keys, name))
    if is_wrong or not all(rules.validator.allows_name(one, name) for one in top.places & rules.checked):
        raise WrongValue(bytes(text[: index + 1]))
    return _with_top(state, name=name, expects_name=False, keys=top.keys | {name} if top.differs else top.keys)


def _complete(state: JsonState, text: bytearray, begin: int, end: int, rules: Rules) -> JsonState:
    """Note that a value is complete: the bytes from ``begin`` to ``end``."""
    top = state.open[-1] if state.open else None
    differs = top is not None and top.differs and top.is_array
    asked = _places(state, rules) & rules.checked
    keys = top.keys if top is not None else frozenset()
    if differs or asked:
        value = json.loads(text[begin:end])
        key = key_of(value) if differs else None
        if differs and key in keys:
            raise WrongValue(*_wrong_beginnings(text, begin, end))
        if not all(rules.validator.is_valid(one, value) for one in asked):
            raise WrongValue(*_wrong_beginnings(text, begin, end), num_evaluated=rules.validator.num_evaluated)
        keys = keys | {key} if differs else keys
    if top is None:
        return state._replace(is_complete=True)
    return _with_top(state, value=-1, end=end, index=top.index + 1, keys=keys)


def _wrong_beginnings(text: bytearray, begin: int, end: int) -> Iterator[bytes]:
    """Yield the beginnings of texts in which a value has its wrong end."""
    whole_text = bytes(text[:end])
    if text[begin] in b'"[{':
        yield whole_text
    else:
        yield from (whole_text + byte for byte in {*ENDS_OF_SCALARS, bytes(text[end : end + 1])} if byte)
