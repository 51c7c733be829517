"""Steps of deterministic automata, where expressions may have assertions.

An assertion about the text before a place follows all of it. One about the text after is an obligation of the nodes
that have passed it: a set of nodes of its own, which must reach its end, or must not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from enginehouse_llguidance.patterns.automata import AutomatonError, Guard, Machine

__all__ = ["Steps", "steps_of"]

_MAX_THREADS = 5000  # nodes of one state with their obligations

_Nodes = frozenset[int]
"""Nodes of an automaton; ``~node`` is one that was passed at the end of the text, so that nothing follows."""

_Obligations = frozenset[tuple[int, _Nodes]]
"""Assertions about what follows, by their index, and the nodes that each has reached; -1 is the end of the text."""

_AT_END: _Obligations = frozenset({(-1, frozenset())})

_State = tuple[frozenset[tuple[_Obligations, _Nodes]], tuple[_Nodes, ...]]
"""Nodes by their obligations, and the nodes of each assertion about what was before."""


class Steps(Protocol):
    """A deterministic automaton. A false state accepts nothing any more."""

    start: Hashable

    def step(self, state: Any, char: int) -> Hashable:
        """Return the state after a character."""

    def accepts(self, state: Any) -> bool:
        """Return True if the text may end."""

    def size(self, state: Any) -> int:
        """Return the number of nodes."""


def steps_of(machine: Machine) -> Steps:
    """Return the deterministic form of an automaton. Raises AutomatonError if assertions contain others."""
    return _Guarded(machine) if machine.guards else _Plain(machine)


class _Plain:
    """An automaton without assertions: a set of nodes."""

    def __init__(self, machine: Machine) -> None:
        self._end = machine.end
        self.start: Hashable = machine.closure([machine.start])
        self.step = machine.step

    def accepts(self, state: _Nodes) -> bool:
        return self._end in state

    def size(self, state: _Nodes) -> int:
        return len(state)


class _Guarded:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._guards = machine.guards
        self._behind = {
            place: one.machine for place, one in enumerate(self._guards) if one.machine and not one.is_ahead
        }
        for one in self._guards:
            inner = one.machine.guards if one.machine else []
            if any(other.machine or (other.is_ahead and not one.is_ahead) for other in inner):
                raise AutomatonError("an assertion within another one is not supported here")
        behind = {place: _entered(one, {one.start}, is_start=True) for place, one in self._behind.items()}
        begin = [(machine.start, frozenset[tuple[int, _Nodes]]())]
        self.start: Hashable = self._state(begin, behind, is_start=True)

    def step(self, state: _State, char: int) -> Hashable:
        if not state:
            return ()
        threads, before = state
        behind = {
            place: _entered(one, one.targets(_active(nodes), char) | {one.start}, is_start=False)
            for (place, one), nodes in zip(self._behind.items(), before, strict=True)
        }
        begin = []
        for obligations, nodes in threads:
            kept = self._after(obligations, char)
            if kept is not None:
                begin += [(node, kept) for node in self._machine.targets(nodes, char)]
        return self._state(begin, behind, is_start=False)

    def accepts(self, state: _State) -> bool:
        return bool(state) and any(
            self._machine.end in nodes and all(self._may_end(*one) for one in obligations)
            for obligations, nodes in state[0]
        )

    def size(self, state: _State) -> int:
        if not state:
            return 0
        threads = sum(len(nodes) + sum(len(other) for _, other in obligations) for obligations, nodes in state[0])
        return threads + sum(map(len, state[1]))

    def _may_end(self, index: int, nodes: _Nodes) -> bool:
        if index < 0:
            return True
        guard = self._guards[index]
        assert guard.machine is not None
        return (~guard.machine.end in nodes) != guard.is_negated

    def _after(self, obligations: _Obligations, char: int) -> _Obligations | None:
        """Return what is left of obligations after a character; None if one is broken."""
        kept = set()
        for index, nodes in obligations:
            if index < 0:
                return None
            guard = self._guards[index]
            assert guard.machine is not None
            moved = _entered(guard.machine, guard.machine.targets(_active(nodes), char), is_start=False)
            is_met = guard.machine.end in moved
            if is_met if guard.is_negated else not (is_met or moved):
                return None
            if not is_met and moved:
                kept.add((index, moved))
        return frozenset(kept)

    def _state(self, begin: list[tuple[int, _Obligations]], behind: dict[int, _Nodes], *, is_start: bool) -> Hashable:
        """Return the state of nodes with their obligations, and of those that follow on nothing."""
        found = set(begin)
        waiting = list(found)
        while waiting:
            node, obligations = waiting.pop()
            following = [(target, obligations) for target in self._machine.free[node]]
            for index, target in self._machine.guarded.get(node, ()):
                passed = self._passed(index, obligations, behind, is_start=is_start)
                following += [(target, passed)] if passed is not None else []
            new = [one for one in following if one not in found]
            found.update(new)
            waiting += new
            if len(found) > _MAX_THREADS:
                raise AutomatonError("too many assertions hold at one place")
        grouped: dict[_Obligations, set[int]] = {}
        for node, obligations in found:
            grouped.setdefault(obligations, set()).add(node)
        threads = frozenset((obligations, frozenset(nodes)) for obligations, nodes in grouped.items())
        return (threads, tuple(behind.values())) if threads else ()

    def _passed(
        self, index: int, obligations: _Obligations, behind: dict[int, _Nodes], *, is_start: bool
    ) -> _Obligations | None:
        """Return the obligations of what passes an assertion; None if it does not hold."""
        guard = self._guards[index]
        if guard.machine is None:
            return obligations | _AT_END if guard.is_ahead else obligations if is_start else None
        if not guard.is_ahead:
            return obligations if (guard.machine.end in behind[index]) != guard.is_negated else None
        nodes = _entered(guard.machine, {guard.machine.start}, is_start=is_start)
        if guard.machine.end in nodes:
            return None if guard.is_negated else obligations
        return obligations | {(index, nodes)}


def _active(nodes: Iterable[int]) -> list[int]:
    return [node for node in nodes if node >= 0]


def _entered(machine: Machine, nodes: set[int], *, is_start: bool) -> _Nodes:
    """Return nodes of an assertion and those that follow on nothing; it has no assertions but the ends of the text."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        is_last = node < 0
        place = ~node if is_last else node
        following = [~target if is_last else target for target in machine.free[place]]
        for index, target in machine.guarded.get(place, ()):
            guard: Guard = machine.guards[index]
            if guard.is_ahead:
                following.append(~target)
            elif is_start:
                following.append(~target if is_last else target)
        new = [other for other in following if other not in found]
        found.update(new)
        waiting += new
    return frozenset(found)
