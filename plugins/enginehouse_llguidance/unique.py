"""Enforces ``uniqueItems``, which a grammar cannot express: forbids the tokens that would complete an equal item.

The follower reads the JSON as it is written. While an item of such an array is written, the tokens that would complete
one that the array has already are removed from the mask, and so are those after which only such tokens remain: the text
then never has to be taken back, and a sequence that is repeated in another worker is the same.

An item ends with its last byte (strings, arrays, objects) or with the comma or bracket after it (other values). As the
text of the same value is nearly always the same, the look-ahead follows the texts of the earlier items; equality is
decided by value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from attrs import define, evolve, field
from llguidance import LLMatcher
from numpy.typing import NDArray

from enginehouse.contract.errors import GenerationFailed
from enginehouse_llguidance.digits import limit_number
from enginehouse_llguidance.schemas.distinct import UNIQUE, UNIQUE_NAMES, count_values
from enginehouse_llguidance.schemas.values import key_of
from enginehouse_llguidance.tokens import NUMBER, TokenTexts, bits_of, clear, is_allowed

__all__ = ["UniqueItems", "UniqueSites"]

_SEPARATOR = b", "
_ZERO_TO_A_POWER = re.compile(rb"-?[0.]+[eE]")
_SPACE = frozenset(b" \n\r\t")
_MAX_LOOKED_AT = 500  # texts, for one token: 25 ms

_State = frozenset[int]


class UniqueSites:
    """The places in a prepared schema, as sets of its subschemas, and whether an array there must be unique.

    Where it is not known which subschema applies, all of them do.

    Args:
        schema: a prepared schema with its definitions.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions: Mapping[str, Any] = schema.get("$defs", {})
        self._nodes: dict[int, Mapping[str, Any]] = {}
        self._steps: dict[tuple[_State, str | int], _State] = {}
        self._may_run_out: dict[_State, bool] = {}
        self.root = self._closure([schema])

    def is_unique(self, state: _State, is_array: bool) -> bool:
        """Return True if an array at this place must not have equal items, or an object equal names."""
        keyword = UNIQUE if is_array else UNIQUE_NAMES
        return any(keyword in self._nodes[one] for one in state)

    def may_run_out(self, state: _State) -> bool:
        """Return True unless such an array can go on with different items without end."""
        found = self._may_run_out.get(state)
        if found is None:
            items = [self._nodes[one].get("items", True) for one in state if UNIQUE in self._nodes[one]]
            is_simple = len(items) == len(state) and not any("prefixItems" in self._nodes[one] for one in state)
            endless = is_simple and all(count_values(one, self._definitions) == math.inf for one in items)
            found = self._may_run_out[state] = not endless
        return found

    def step(self, state: _State, step: str | int) -> _State:
        """Return the place of a property or an item."""
        found = self._steps.get((state, step))
        if found is None:
            parts = [part for one in state for part in _parts(self._nodes[one], step)]
            found = self._steps[state, step] = self._closure(parts)
        return found

    def _closure(self, schemas: Iterable[Any]) -> _State:
        waiting, found = list(schemas), set[int]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            found.add(id(schema))
            self._nodes[id(schema)] = schema
            if "$ref" in schema:
                waiting.append(self._definitions[schema["$ref"].rpartition("/")[2]])
            waiting += [*schema.get("allOf", ()), *schema.get("anyOf", ())]
        return frozenset(found)


def _parts(schema: Mapping[str, Any], step: str | int) -> Iterable[Any]:
    if isinstance(step, int):
        prefix = schema.get("prefixItems", ())
        return (prefix[step],) if step < len(prefix) else (schema.get("items"),)
    if step in schema.get("properties", ()):
        return (schema["properties"][step],)
    return (*schema.get("patternProperties", {}).values(), schema.get("additionalProperties"))


@define(eq=False)
class _Open:
    """An array or object that is being written.

    Attributes:
        begin: index in the text of the item in progress; of an array before its first item, of its begin.
        end: index after the last complete item.
        used: keys of the complete items.
        texts: their texts.
    """

    is_array: bool
    state: _State
    is_unique: bool
    begin: int
    end: int
    index: int = 0
    has_item: bool = False
    name: str = ""
    used: set[Any] = field(factory=set)
    texts: list[bytes] = field(factory=list)

    @property
    def has_numbers(self) -> bool:
        """True if some item is a number."""
        return any(key[0] == "number" for key in self.used)

    def add(self, item: bytes, key: Any) -> None:
        """Note a complete item."""
        self.used.add(key)
        self.texts += [b"0", b"-0"] if item in (b"0", b"-0") else [item]

    def copy(self) -> _Open:
        """Return a copy that can be changed by itself."""
        return evolve(self, used={*self.used}, texts=[*self.texts]) if self.is_unique else evolve(self)


@define
class _Ahead:
    """Budget and results of one look-ahead.

    Attributes:
        room: number of texts that may still be looked at; beyond, a token counts as possible.
        known: whether an allowed text goes on after a text that follows the written one.
    """

    room: int = _MAX_LOOKED_AT
    known: dict[bytes, bool] = field(factory=dict)


class UniqueItems:
    """Follows one answer.

    Args:
        sites: the places of the schema.
        tokens: the vocabulary.
    """

    def __init__(self, sites: UniqueSites, tokens: TokenTexts) -> None:
        self._sites, self._tokens = sites, tokens
        self._text = bytearray()
        self._open: list[_Open] = []
        self._string_begin = -1
        self._is_escaped = False
        self._expects_name = False

    # -- the text --------------------------------------------------------------------------------------------------

    def accept(self, text: bytes) -> None:
        """Follow the bytes of a token."""
        for byte in text:
            self._text.append(byte)
            if self._string_begin >= 0:
                self._in_string(byte)
            else:
                self._outside(byte)

    def _in_string(self, byte: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif byte == 0x5C:
            self._is_escaped = True
        elif byte == 0x22:
            begin, self._string_begin = self._string_begin, -1
            if self._expects_name:
                self._name(bytes(self._text[begin:]))
            else:
                self._complete()

    def _name(self, text: bytes) -> None:
        top = self._open[-1]
        top.name, self._expects_name = json.loads(text), False
        if top.is_unique:
            if key_of(top.name) in top.used:
                raise GenerationFailed(f"the object has this name already: {top.name[:60]!r}", "llguidance")
            top.add(text, key_of(top.name))

    def _outside(self, byte: int) -> None:
        top = self._open[-1] if self._open else None
        if byte in b"{[":
            self._begin_item(top)
            state = self._state_of_value(top)
            is_array = byte == 0x5B
            place = len(self._text)
            is_unique = self._sites.is_unique(state, is_array)
            self._open.append(_Open(is_array, state, is_unique, place, place))
            self._expects_name = not is_array
        elif byte in b"}]":
            assert top is not None
            if top.has_item:
                self._complete(before=1)
            self._open.pop()
            self._expects_name = False
            self._complete()
        elif byte == 0x2C:
            assert top is not None
            if top.has_item:
                self._complete(before=1)
            if not top.is_array:
                self._expects_name, top.end = True, len(self._text) - 1
        elif byte == 0x22:
            self._string_begin = len(self._text) - 1
            if not self._expects_name:
                self._begin_item(top)
        elif byte not in _SPACE and byte != 0x3A:
            self._begin_item(top)

    def _state_of_value(self, top: _Open | None) -> _State:
        if top is None:
            return self._sites.root
        return self._sites.step(top.state, top.index if top.is_array else top.name)

    def _begin_item(self, top: _Open | None) -> None:
        if top is not None and top.is_array and not top.has_item:
            top.begin, top.has_item = len(self._text) - 1, True

    def _complete(self, before: int = 0) -> None:
        """Note that the value at the end of the text, without its last ``before`` bytes, is complete."""
        top = self._open[-1] if self._open else None
        if top is None or not top.is_array or not top.has_item:
            return
        top.end, top.has_item = len(self._text) - before, False
        top.index += 1
        if top.is_unique:
            item = bytes(self._text[top.begin : top.end])
            key = key_of(json.loads(item))
            if key in top.used:
                raise GenerationFailed(f"uniqueItems: the array has this item already: {item[:60]!r}", "llguidance")
            top.add(item, key)

    # -- the mask --------------------------------------------------------------------------------------------------

    def restrict(self, bitmask: NDArray[np.int32], matcher: LLMatcher) -> None:
        """Forbid tokens, in place.

        Args:
            matcher: after the same text.

        Raises:
            GenerationFailed: no token is left: there are fewer different items than the array must have.
        """
        if not any(one.is_unique for one in self._open):
            return
        ahead = _Ahead()
        for token_id in self._suspects(bitmask):
            if is_allowed(bitmask, token_id) and not self._leads_on(b"", token_id, matcher, ahead):
                clear(bitmask, np.array([token_id]))
        if not bitmask.any():
            message = "there are fewer different items or names than the schema asks for"
            raise GenerationFailed(message, "llguidance")

    def _suspects(self, bitmask: NDArray[np.int32]) -> list[int]:
        """Forbid tokens that complete an equal item, in place; return those after which only such tokens may remain."""
        suspects: dict[int, None] = {}
        for array in self._open:
            if not array.is_unique:
                continue
            whole, beginnings = self._along(array)
            for ids in whole:
                clear(bitmask, ids)
            suspects |= dict.fromkeys(beginnings)
            if array.has_item:
                item = bytes(self._text[array.begin :])
                clear(bitmask, self._equal(array, item, bitmask))
            suspects |= dict.fromkeys(self._crossing(array, bitmask))
        return list(suspects)

    def _crossing(self, array: _Open, bitmask: NDArray[np.int32]) -> Iterator[int]:
        """Yield allowed tokens that end an item and begin another one, if that may be equal or missing."""
        if not array.is_array:
            return
        item = bytes(self._text[array.begin :]) if array.has_item else b""
        may_run_out = array.has_item and self._sites.may_run_out(array.state)
        for token_id in bits_of(bitmask, self._tokens.separating if may_run_out else self._tokens.crossing).tolist():
            text = self._tokens.bytes_of[token_id]
            if item[:1] == b'"' and b'"' not in text:
                continue  # the string goes on
            if not item or _split(item, text)[1].startswith(b","):
                yield token_id

    def _leads_on(self, path: bytes, token_id: int, matcher: LLMatcher, ahead: _Ahead) -> bool:
        """Return True if some text may follow a token.

        Args:
            path: the text that was looked at before, after the written one.
            matcher: after ``path``.
        """
        path += self._tokens.bytes_of[token_id]
        found = ahead.known.get(path)
        if found is None:
            ahead.room -= 1
            found = ahead.known[path] = ahead.room < 0 or self._finds_way(path, token_id, matcher, ahead)
        return found

    def _finds_way(self, path: bytes, token_id: int, matcher: LLMatcher, ahead: _Ahead) -> bool:
        after, following = self._copy(), matcher.deep_copy()
        try:
            after.accept(self._tokens.bytes_of[token_id])
        except GenerationFailed:
            return False
        if not following.consume_token(token_id):
            return False
        if following.is_stopped():
            return not following.is_error()
        bitmask = np.zeros((len(self._tokens.bytes_of) + 31) // 32, np.int32)
        following.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        number = bytes(after._text[len(after._text.rstrip(NUMBER)) :])
        if number and after._string_begin < 0:
            limit_number(number, self._tokens, bitmask)
        suspects = [one for one in after._suspects(bitmask) if is_allowed(bitmask, one)]
        clear(bitmask, np.array(suspects, np.int64))
        return bool(bitmask.any()) or any(after._leads_on(path, one, following, ahead) for one in suspects)

    def _copy(self) -> UniqueItems:
        copy = UniqueItems(self._sites, self._tokens)
        copy._text, copy._open = bytearray(self._text), [one.copy() for one in self._open]
        copy._string_begin, copy._is_escaped = self._string_begin, self._is_escaped
        copy._expects_name = self._expects_name
        return copy

    def _equal(self, array: _Open, item: bytes, bitmask: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return allowed tokens that complete an array or object which equals an earlier one in value."""
        found = []
        for token_id in bits_of(bitmask, self._tokens.closing).tolist() if item[:1] in (b"{", b"[") else ():
            whole, _ = _split(item, self._tokens.bytes_of[token_id])
            if whole and _key(whole) in array.used:
                found.append(token_id)
        return np.array(found, np.int64)

    def _along(self, array: _Open) -> tuple[list[NDArray[np.int64]], list[int]]:
        """Return the tokens that complete an equal item, and those that leave this possible."""
        whole: list[NDArray[np.int64]] = []
        beginnings: dict[int, None] = {}
        written = bytes(self._text[array.end :])
        for item in array.texts:
            text = _SEPARATOR + item
            if not text.startswith(written):
                continue
            rest = text[len(written) :]
            ends_itself = item[:1] in (b'"', b"[", b"{")
            ends = (b"",) if ends_itself else (b",", b"]")
            whole += [self._tokens.starting_with(rest + end) for end in ends if rest + end]
            beginnings |= dict.fromkeys(self._tokens.beginnings_of(rest[:-1] if ends_itself else rest))
        item = written.removeprefix(_SEPARATOR)
        if written.startswith(_SEPARATOR) and not item.strip(NUMBER) and array.has_numbers:
            equal, on_the_way = self._along_numbers(array, item)
            whole.append(equal)
            beginnings |= dict.fromkeys(on_the_way)
        return whole, list(beginnings)

    def _along_numbers(self, array: _Open, item: bytes) -> tuple[NDArray[np.int64], list[int]]:
        """Return the tokens that end a number equal to an earlier one, and those after which zeros may do so."""
        equal = [one for one, digits in self._tokens.ending_number if _key(item + digits) in array.used]
        on_the_way = [one for one, digits in self._tokens.of_digits if _key(_completed(item + digits)) in array.used]
        if ("number", 0) in array.used:  # an exponent leaves zero what it is
            zeros = [one for one in on_the_way if _ZERO_TO_A_POWER.match(item + self._tokens.bytes_of[one])]
            equal, on_the_way = [*equal, *zeros], [one for one in on_the_way if one not in zeros]
        return np.array(equal, np.int64), on_the_way


def _completed(number: bytes) -> bytes:
    """Return a number of the same value for the beginning of one."""
    return number if number[-1:].isdigit() else number + b"0"


def _key(text: bytes) -> Any:
    try:
        return key_of(json.loads(text))
    except ValueError:
        return None


def _split(item: bytes, token: bytes) -> tuple[bytes, bytes]:
    """Return the item that a token completes, and the text after it; empty if it does not complete the item."""
    text = item + token
    if item[:1] not in (b'"', b"[", b"{"):
        end = min((place for place in (text.find(b","), text.find(b"]")) if place >= 0), default=0)
        return text[:end], text[end:]
    try:
        shown = text.decode("utf-8", "surrogateescape")
        _, end = json.JSONDecoder().raw_decode(shown)
    except ValueError:
        return b"", b""
    whole = shown[:end].encode("utf-8", "surrogateescape")
    return whole, text[len(whole) :]
