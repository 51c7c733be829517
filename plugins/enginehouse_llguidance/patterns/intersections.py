"""Intersections and complements of regular expressions, and what they assert, written as plain expressions again.

The library has neither when it compiles JSON Schema, so expressions become automata here: the product of deterministic
automata decides, and its states are eliminated one by one.

Source: subset construction, partition refinement and state elimination from textbooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise

from attrs import frozen

from enginehouse_llguidance.patterns.assertions import Steps, steps_of
from enginehouse_llguidance.patterns.automata import AutomatonError, Machine
from enginehouse_llguidance.patterns.characters import EVERY, LAST, SURROGATES, Ranges, joined

__all__ = ["NothingMatches", "limited_work", "listed", "restricted"]

_MAX_STATES = 1500
_MAX_MINIMIZED = 250
_MAX_STEPS = 1_000_000  # of nodes, about half a second
_MAX_ALL_STEPS = 5_000_000
_STEPS_OF_NODE = 10  # to build it
_left: ContextVar[list[int] | None] = ContextVar("left", default=None)
"""Steps that are left to the automata of a schema."""

_MAX_CHARS = 40_000
_TOO_LARGE = "too large beside assertions or other expressions"


class NothingMatches(AutomatonError):
    """No text satisfies all conditions."""


class _OutOfWork(AutomatonError):
    """The automata of a schema took all the work that they may take together."""


@contextmanager
def limited_work() -> Iterator[None]:
    """Limit the work of all automata that are built within it, such as those of one schema."""
    token = _left.set([_MAX_ALL_STEPS])
    try:
        yield
    finally:
        _left.reset(token)


def restricted(text: str, conditions: Sequence[tuple[str, bool]]) -> str:
    """Return an expression for what matches ``text`` and each condition, or does not match a negated one.

    Args:
        conditions: expressions of whole texts, and True for those that are negated.

    Raises:
        NothingMatches: no text satisfies the conditions.
        AutomatonError: there are too many states, or too many were built before.
    """
    found = _restricted(text, tuple(conditions))
    if isinstance(found, AutomatonError):
        raise type(found)(*found.args)
    return found


@lru_cache(128)
def _restricted(text: str, conditions: tuple[tuple[str, bool], ...]) -> str | AutomatonError:
    """Return the expression, or why there is none; raises _OutOfWork, which is true of one schema only."""
    left = _left.get() or [_MAX_STEPS]
    if left[0] < 0:
        raise _OutOfWork(_TOO_LARGE)
    try:
        machines = [Machine.of(expression) for expression in (text, *(expression for expression, _ in conditions))]
        left[0] -= _STEPS_OF_NODE * sum(machine.size for machine in machines)
        wanted = (True, *(not is_negated for _, is_negated in conditions))
        product = _minimized(_determinized(machines, wanted))
        return _eliminated(product) if len(product.table) <= _MAX_MINIMIZED else AutomatonError(_TOO_LARGE)
    except _OutOfWork:
        raise
    except AutomatonError as error:
        return type(error)(*error.args)  # without the frames that the error itself refers to


def listed(text: str, at_most: int) -> list[str] | None:
    """Return all texts that an expression matches; None if they are too many, or it is too large to tell."""
    try:
        product = _minimized(_determinized([Machine.of(text)], [True]))
    except NothingMatches:
        return []
    except AutomatonError:
        return None
    found: list[str] = []
    waiting = [(0, "")]
    while waiting:
        state, begin = waiting.pop()
        found += [begin] if state in product.accepting else []
        for ranges, to in zip(product.classes, product.table[state], strict=True):
            for low, high in ranges if to != _DEAD else ():
                if len(found) + len(waiting) + high - low >= at_most:  # each of them leads to a text
                    return None
                waiting += [(to, begin + chr(code)) for code in range(low, high + 1)]
    return sorted(found)


_Table = list[list[int]]  # for each state, the next state for each class of characters, or _DEAD
_DEAD = -1


@frozen
class _Product:
    """Product of all automata. State 0 is the start.

    Attributes:
        classes: characters that no automaton distinguishes.
    """

    classes: list[Ranges]
    table: _Table
    accepting: set[int]


def _determinized(machines: Sequence[Machine], wanted: Sequence[bool]) -> _Product:
    classes = _classes(machines)
    automata: list[Steps] = [steps_of(machine) for machine in machines]
    start = tuple(one.start for one in automata)
    states, numbers = [start], {start: 0}
    table: _Table = []
    left, num_steps = _left.get() or [_MAX_STEPS], 0
    while len(table) < len(states):
        state = states[len(table)]
        size = len(classes) * sum(one.size(nodes) for one, nodes in zip(automata, state, strict=True))
        num_steps += size
        left[0] -= size
        if left[0] < 0:
            raise _OutOfWork(_TOO_LARGE)
        if num_steps > _MAX_STEPS or len(states) > _MAX_STATES:
            raise AutomatonError(_TOO_LARGE)
        row = []
        for ranges in classes:
            following = tuple(one.step(nodes, ranges[0][0]) for one, nodes in zip(automata, state, strict=True))
            if following not in numbers and following[0]:
                numbers[following] = len(states)
                states.append(following)
            # Once the first automaton, the expression itself, is dead, the conditions are irrelevant.
            row.append(numbers[following] if following[0] else _DEAD)
        table.append(row)
    accepting = {
        number
        for state, number in numbers.items()
        if all(one.accepts(nodes) == want for one, nodes, want in zip(automata, state, wanted, strict=True))
    }
    return _Product(classes, table, accepting)


def _classes(machines: Sequence[Machine]) -> list[Ranges]:
    """Return the characters, without surrogates, divided by the sets of the machines that they belong to."""
    sets: dict[Ranges, int] = {}
    waiting = list(machines)
    while waiting:
        machine = waiting.pop()
        waiting += [guard.machine for guard in machine.guards if guard.machine is not None]
        for moves in machine.moves:
            for ranges, _ in moves:
                sets.setdefault(ranges, len(sets))
    changes: dict[int, list[int]] = defaultdict(list, {0: [], LAST + 1: []})
    for ranges, number in [(SURROGATES, -1), *sets.items()]:
        for low, high in ranges:
            changes[low].append(number)
            changes[high + 1].append(number)
    members: set[int] = set()
    found: dict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    bounds = sorted(changes)
    for low, following in pairwise(bounds):
        for number in changes[low]:
            members ^= {number}
        if -1 not in members:
            found[frozenset(members)].append((low, following - 1))
    return [joined(ranges) for ranges in found.values()]


def _minimized(product: _Product) -> _Product:
    """Return the minimal equivalent automaton, without states from which nothing is accepted."""
    table, states = product.table, range(len(product.table))
    alive = _alive(product)
    if 0 not in alive:
        raise NothingMatches("no text satisfies what the expression asserts")
    blocks = [int(state in product.accepting) if state in alive else _DEAD for state in states]
    num_blocks = 0
    while num_blocks < len(set(blocks)):
        num_blocks = len(set(blocks))
        shapes = [(blocks[state], *(blocks[to] if to >= 0 else _DEAD for to in table[state])) for state in states]
        names = {
            shape: number
            for number, shape in enumerate(dict.fromkeys(shapes[state] for state in states if state in alive))
        }
        blocks = [names[shapes[state]] if state in alive else _DEAD for state in states]
    small: _Table = [[] for _ in range(max(blocks) + 1)]
    for state in alive:
        small[blocks[state]] = [blocks[to] if to >= 0 else _DEAD for to in table[state]]
    return _Product(product.classes, small, {blocks[state] for state in product.accepting})


def _alive(product: _Product) -> set[int]:
    """Return the states from which something is accepted."""
    before: dict[int, list[int]] = defaultdict(list)
    for state, row in enumerate(product.table):
        for to in set(row):
            before[to].append(state)
    alive = set(product.accepting)
    waiting = list(alive)
    while waiting:
        new = [state for state in before[waiting.pop()] if state not in alive]
        alive.update(new)
        waiting += new
    return alive


# -- back to an expression -----------------------------------------------------------------------------


def _eliminated(product: _Product) -> str:
    """Return the expression of an automaton by state elimination: paths through a removed state are replaced."""
    first, last = -1, -2
    edges: dict[tuple[int, int], str] = {(first, 0): ""}  # state 0 is in block 0, which is named first
    edges |= {(state, last): "" for state in product.accepting}
    for state, row in enumerate(product.table):
        targets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for target, ranges in zip(row, product.classes, strict=True):
            targets[target] += ranges
        edges |= {(state, to): _written(joined(ranges)) for to, ranges in targets.items() if to != _DEAD}
    left = {state for edge in edges for state in edge if state >= 0}
    while left:
        into: dict[int, int] = defaultdict(int)
        out: dict[int, int] = defaultdict(int)
        for (source, target), text in edges.items():
            into[target] += len(text) + 1
            out[source] += len(text) + 1
        gone = min(left, key=lambda state: into[state] * out[state])
        left.remove(gone)
        loop = edges.pop((gone, gone), None)
        around = f"(?:{loop})*" if loop else ""
        sources = [(source, edges.pop((source, gone))) for source, target in list(edges) if target == gone]
        followers = [(target, edges.pop((gone, target))) for source, target in list(edges) if source == gone]
        for source, before in sources:
            for target, after in followers:
                path = _grouped(before) + around + _grouped(after)
                known = edges.get((source, target))
                edges[source, target] = path if known is None else f"{known}|{path}"
        if sum(map(len, edges.values())) > _MAX_CHARS:
            raise AutomatonError(_TOO_LARGE)
    return f"(?:{edges[first, last]})"


def _grouped(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _written(ranges: Ranges) -> str:
    if joined((*ranges, *SURROGATES)) == ((0, LAST),):
        return EVERY
    parts = (f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges)
    return f"[{''.join(parts)}]"
