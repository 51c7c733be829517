"""Expressions whose matches depend on a search: back-references, atomic groups and conditions on groups.

A program for each dialect is executed with an explicit stack, so that no text overflows Python's. A state that failed
is not tried again, and the number of states is limited: a search takes time, but not without bounds.

Source: the backtracking machine of ECMA-262, section 22.2.2, as instructions like those of Cox, "Regular Expression
Matching: the Virtual Machine Approach" (2009), with memoization as of Davis et al., "Using Selective Memoization to
Defeat Regular Expression Denial of Service" (2021).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from attrs import define, field, frozen

from enginehouse_llguidance.patterns.automata import AutomatonError, read_atom
from enginehouse_llguidance.patterns.characters import EVERY, Ranges, has_char
from enginehouse_llguidance.patterns.reading import Reader
from enginehouse_llguidance.patterns.tree import (
    START,
    Anchor,
    Condition,
    Group,
    Item,
    Look,
    Reference,
    Sequence,
    has_groups,
)

__all__ = ["Backtracker"]

_MAX_INSTRUCTIONS = 20_000
_MAX_STATES = 200_000  # to match one text: half a second
_MAX_GUIDED = 1000  # to find out what may follow
_UNSET = -1
_ANY = Group([[f"{EVERY}*"]])  # before the start of a text, it is empty


class Backtracker:
    """An expression that is searched for in texts, as all dialects do.

    Args:
        reader: has read the expression.
        alternatives: the expression.

    Attributes:
        size: number of instructions.
        num_states: states that were tried for the last text.
        is_monotone: a class of more characters matches more texts; not where a search is cut.

    Raises:
        AutomatonError: it is too large, or outside the supported dialect.
    """

    def __init__(self, reader: Reader, alternatives: list[Sequence]) -> None:
        compilers = [_Compiler(reader, is_ecma=is_ecma) for is_ecma in (False, True)]
        self._programs = [one.whole(alternatives) for one in compilers]
        self._is_any = reader.is_widened
        self._is_anchored = all(map(_begins_text, alternatives))
        self._last: tuple[str | None, list[str] | None] = (None, None)  # a text, and what may follow it
        self.num_states = 0
        self.size = sum(one.num_instructions for one in compilers)
        self.is_monotone = not any(one.has_cuts for one in compilers)

    def matches(self, text: str) -> bool:
        """Return True if the expression is found in a text; one that is widened, in any dialect.

        Raises:
            AutomatonError: the search takes too long.
        """
        self.num_states = 0
        for program in self._programs:
            search = _Search(text, _MAX_STATES)
            found = search.finds(program)
            self.num_states += _MAX_STATES - search.left
            if found == self._is_any:
                return found
        return not self._is_any

    def following(self, text: str) -> list[str] | None:
        """Return what may follow a text so that all of it may match, "" for its end; None if that is not known."""
        if not self._is_anchored:
            return None
        known, following = self._last
        if known != text:
            following = self._find_following(text)
            self._last = (text, following)
        return following

    def _find_following(self, text: str) -> list[str] | None:
        search = _Search(text, _MAX_GUIDED, is_partial=True)
        try:
            search.finds(self._programs[0])
        except (AutomatonError, _Unknown):
            return None
        return sorted(search.following)


_Instruction = tuple[Any, ...]


@frozen(eq=False)
class _Program:
    """Instructions; ``num_registers`` hold begins and ends of groups, and begins of repetitions."""

    code: list[_Instruction]
    is_backwards: bool
    num_registers: int = 0
    captures: bool = False


# -- from an expression to a program -------------------------------------------------------------------


@define
class _Compiler:
    """Compiles one expression for one dialect.

    Attributes:
        registers: of each group that is referred to: that of its begin; that of its end follows.
    """

    reader: Reader
    is_ecma: bool
    num_instructions: int = 0
    has_cuts: bool = False
    num_registers: int = 0
    registers: dict[int, int] = field(factory=dict)

    def whole(self, alternatives: list[Sequence]) -> _Program:
        for group in self.reader.referred:
            for number in self.reader.numbers_of(group):
                self.registers.setdefault(number, 2 * len(self.registers))
        self.num_registers = 2 * len(self.registers)
        program = self._program(alternatives, is_backwards=False)
        return _Program(program.code, False, self.num_registers)

    def _program(self, alternatives: list[Sequence], *, is_backwards: bool) -> _Program:
        code: list[_Instruction] = []
        self._alternatives(code, alternatives, is_backwards)
        self._add(code, "match")
        return _Program(code, is_backwards, captures=any(has_groups(item) for one in alternatives for item in one))

    def _count(self) -> None:
        self.num_instructions += 1
        if self.num_instructions > _MAX_INSTRUCTIONS:
            raise AutomatonError("an expression with back-references is too large")

    def _add(self, code: list[_Instruction], *instruction: Any) -> int:
        self._count()
        code.append(instruction)
        return len(code) - 1

    def _alternatives(self, code: list[_Instruction], alternatives: list[Sequence], is_backwards: bool) -> None:
        ends = []
        for number, option in enumerate(alternatives):
            is_last = number == len(alternatives) - 1
            split = None if is_last else self._add(code)
            items = [
                item for item, after in zip_longest(option, option[1:]) if item != _ANY or not _begins_text([after])
            ]
            for item in reversed(items) if is_backwards else items:
                self._item(code, item, is_backwards)
            if split is not None:
                ends.append(self._add(code))
                code[split] = ("split", split + 1, len(code))
        for end in ends:
            code[end] = ("jump", len(code))

    def _item(self, code: list[_Instruction], item: Item, is_backwards: bool) -> None:
        match item:
            case str():
                ranges, least, most = read_atom(item)
                self._repeat(code, ("char", ranges), least, most, is_backwards)
            case Anchor(is_start):
                self._add(code, "start" if is_start else "end")
            case Look(alternatives, is_ahead, is_negated):
                program = self._program(alternatives, is_backwards=not is_ahead)
                self.has_cuts |= program.captures
                self._add(code, "look", program, is_negated)
            case Reference(group, is_early):
                places = [self.registers[one] for one in self.reader.numbers_of(group)]
                self._add(code, "reference", places, is_early or self.is_ecma, item)
            case Condition(group, then, otherwise):
                self._condition(code, group, then, otherwise, is_backwards)
            case Group(_, quantifier):
                least, most = read_atom(f"a{quantifier}")[1:]
                self._repeat(code, item, least, most, is_backwards)

    def _condition(
        self, code: list[_Instruction], group: int | str, then: Sequence, otherwise: Sequence, is_backwards: bool
    ) -> None:
        begin = self._add(code)
        self._alternatives(code, [then], is_backwards)
        end = self._add(code)
        places = [self.registers[one] for one in self.reader.numbers_of(group)]
        code[begin] = ("condition", places, len(code))
        self._alternatives(code, [otherwise], is_backwards)
        code[end] = ("jump", len(code))

    def _repeat(
        self, code: list[_Instruction], body: Group | _Instruction, least: int, most: int | None, is_backwards: bool
    ) -> None:
        is_lazy = isinstance(body, Group) and body.is_lazy
        for _ in range(least):
            self._once(code, body, is_backwards)
        splits, checks = [], []
        register = (
            self.num_registers if isinstance(body, Group) and any(map(_may_be_empty, body.alternatives)) else None
        )
        self.num_registers += register is not None
        for _ in range(1 if most is None else most - least):
            splits.append(self._add(code))
            if register is not None:
                self._add(code, "save", register)
            self._once(code, body, is_backwards)
            if register is not None:
                checks.append(self._add(code))
            if most is None:
                self._add(code, "jump", splits[0])
        for place in splits:
            code[place] = ("split", len(code), place + 1) if is_lazy else ("split", place + 1, len(code))
        for place in checks:  # an empty repetition is the last one, in ECMAScript not even that
            code[place] = ("progress", register, None if self.is_ecma else len(code))

    def _once(self, code: list[_Instruction], body: Group | _Instruction, is_backwards: bool) -> None:
        if not isinstance(body, Group):
            self._add(code, *body)
            return
        self._count()  # an empty group has no instructions
        if self.is_ecma and body.quantifier and (inside := self._inside(body)):
            self._add(code, "reset", inside)
        register = self.registers.get(body.number) if body.number is not None else None
        if register is not None:
            self._add(code, "save", register + is_backwards)
        if body.is_atomic:
            self.has_cuts = True
            self._add(code, "atomic", self._program(body.alternatives, is_backwards=is_backwards))
        else:
            self._alternatives(code, body.alternatives, is_backwards)
        if register is not None:
            self._add(code, "save", register + (not is_backwards))

    def _inside(self, item: Item) -> list[int]:
        """Return the registers of the groups in an item."""
        number = item.number if isinstance(item, Group) else None
        found = [self.registers[number]] if number in self.registers else []
        options = item.alternatives if isinstance(item, Group | Look) else []
        return found + [register for option in options for one in option for register in self._inside(one)]


def _begins_text(option: list[Item | None]) -> bool:
    """Return True if a sequence only matches at the start of a text."""
    first = next((item for item in option if not isinstance(item, Look)), None)
    if isinstance(first, Group):
        return read_atom(f"a{first.quantifier}")[1] > 0 and all(map(_begins_text, first.alternatives))
    return first == START


def _may_be_empty(option: Sequence) -> bool:
    return all(map(_is_optional, option))


def _is_optional(item: Item) -> bool:
    """Return True if an item may match the empty text."""
    if isinstance(item, str):
        return read_atom(item)[1] == 0
    if isinstance(item, Group):
        return read_atom(f"a{item.quantifier}")[1] == 0 or any(map(_may_be_empty, item.alternatives))
    return not isinstance(item, Condition) or _may_be_empty(item.then) or _may_be_empty(item.otherwise)


# -- its execution -------------------------------------------------------------------------------------


class _Unknown(Exception):
    """What may follow is not known."""


_State = tuple[int, int, tuple[int, ...]]
"""Index of an instruction, place in the text, registers."""


@define
class _Search:
    """A search in one text.

    Attributes:
        left: states that may still be tried.
        is_partial: more text may follow: all matches are tried, to collect what they need in ``following``.
        is_touched: it depended on the end of a partial text.
    """

    text: str
    left: int
    is_partial: bool = False
    is_touched: bool = False
    following: set[str] = field(factory=set)

    def finds(self, program: _Program) -> bool:
        """Return True if there is a match anywhere."""
        seen: set[_State] = set()
        registers = (_UNSET,) * program.num_registers
        for begin in range(len(self.text), -1, -1) if self.is_partial else range(len(self.text) + 1):
            if self._first(program, begin, registers, seen) is None:
                continue
            return True
        return False

    def _first(
        self, program: _Program, begin: int, registers: tuple[int, ...], seen: set[_State], *, is_inner: bool = False
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return end and registers of the first match that begins at a place."""
        stack: list[_State] = [(0, begin, registers)]
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            self.left -= 1
            if self.left < 0:
                raise AutomatonError("the search for an expression takes too long")
            number, place, registers = state
            instruction = program.code[number]
            if instruction[0] == "match":
                if is_inner or not self.is_partial:
                    return place, registers
                raise _Unknown  # anything may follow
            if instruction[0] == "split":
                stack += [(instruction[2], place, registers), (instruction[1], place, registers)]
            elif (after := self._step(program, instruction, state, is_inner)) is not None:
                stack.append(after)
        return None

    def _step(  # noqa: PLR0911, PLR0912 - one per instruction
        self, program: _Program, instruction: _Instruction, state: _State, is_inner: bool
    ) -> _State | None:
        """Return the state after an instruction; None if it failed."""
        number, place, registers = state
        match instruction:
            case ("char", ranges):
                return self._char(program, ranges, state, is_inner)
            case ("reference", places, may_be_unset, reference):
                word = self._captured(places, registers)
                if word is None:
                    return (number + 1, place, registers) if may_be_unset else None
                return self._reference(program, word, reference, state, is_inner)
            case ("start",):
                return (number + 1, place, registers) if place == 0 else None
            case ("end",):
                if place == len(self.text) and self.is_partial:
                    self._touch({""}, is_inner)
                    return None
                return (number + 1, place, registers) if place == len(self.text) else None
            case ("jump", target):
                return target, place, registers
            case ("save", register):
                return number + 1, place, _with(registers, {register: place})
            case ("reset", begins):
                changes = {register: _UNSET for begin in begins for register in (begin, begin + 1)}
                return number + 1, place, _with(registers, changes)
            case ("progress", register, target):
                if place == registers[register]:
                    return None if target is None else (target, place, _with(registers, {register: _UNSET}))
                return number + 1, place, _with(registers, {register: _UNSET})
            case ("condition", places, target):
                is_set = self._captured(places, registers) is not None
                return number + 1 if is_set else target, place, registers
            case ("look", inner, is_negated):
                found = self._inner(inner, place, registers, is_cut=inner.captures and not is_negated)
                if (found is None) != is_negated:
                    return None
                return number + 1, place, registers if found is None else found[1]
        _, inner = instruction
        found = self._inner(inner, place, registers, is_cut=True)
        return None if found is None else (number + 1, *found)

    def _inner(
        self, program: _Program, place: int, registers: tuple[int, ...], *, is_cut: bool
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the first match of an assertion or an atomic group.

        Args:
            is_cut: it matters which one is the first.
        """
        self.is_touched = False
        found = self._first(program, place, registers, set(), is_inner=True)
        if self.is_touched and (found is None or is_cut):
            raise _Unknown
        return found

    def _touch(self, following: set[str] | None, is_inner: bool) -> None:
        """Note that a match depends on what follows a partial text: one of these; None: on anything."""
        if is_inner:
            self.is_touched = True
        elif following is None:
            raise _Unknown
        else:
            self.following |= following

    def _char(self, program: _Program, ranges: Ranges, state: _State, is_inner: bool) -> _State | None:
        number, place, registers = state
        at, to = (place - 1, place - 1) if program.is_backwards else (place, place + 1)
        if 0 <= at < len(self.text):
            return (number + 1, to, registers) if has_char(ranges, ord(self.text[at])) else None
        if self.is_partial and not program.is_backwards:
            self._touch(None, is_inner)
        return None

    def _captured(self, places: list[int], registers: tuple[int, ...]) -> str | None:
        """Return the text of a group; None if it has not matched. Groups of one name are alternatives."""
        for begin in places:
            if registers[begin] != _UNSET and registers[begin + 1] != _UNSET:
                return self.text[registers[begin] : registers[begin + 1]]
        return None

    def _reference(
        self, program: _Program, word: str, reference: Reference, state: _State, is_inner: bool
    ) -> _State | None:
        number, place, registers = state
        if program.is_backwards:
            begin = place - len(word)
            is_found = begin >= 0 and _are_same(self.text[begin:place], word, reference)
            return (number + 1, begin, registers) if is_found else None
        part = self.text[place : place + len(word)]
        if not _are_same(part, word[: len(part)], reference):
            return None
        if len(part) < len(word):
            if self.is_partial:
                self._touch(None if reference.ignores_case else {word[len(part) :]}, is_inner)
            return None
        return number + 1, place + len(word), registers


def _with(registers: tuple[int, ...], changes: dict[int, int]) -> tuple[int, ...]:
    return tuple(changes.get(index, value) for index, value in enumerate(registers))


def _are_same(text: str, word: str, reference: Reference) -> bool:
    """Return True if a text is that of a group, for all dialects; for any of them in a negation."""
    if text == word or not reference.ignores_case:
        return text == word
    if reference.is_widened:
        return all(_of_any_case(one) & _of_any_case(other) for one, other in zip(text, word, strict=True))
    return all(
        one == other or (one.isascii() and other.isascii() and one.lower() == other.lower())
        for one, other in zip(text, word, strict=True)
    )


def _of_any_case(char: str) -> set[str]:
    return {char, char.lower(), char.upper(), char.casefold(), char.upper().lower()}
