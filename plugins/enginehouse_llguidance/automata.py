r"""Intersections and complements of regular expressions, written as expressions again.

The library's own dialect has neither when it compiles JSON Schema, so expressions become automata here: the product of
deterministic automata decides, and its states are eliminated one by one. Reads the dialect that ``patterns`` writes,
without ``\p``. Called for look-ahead, and where values are evaluated.

Source: subset construction, partition refinement and state elimination from textbooks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from attrs import field, frozen

__all__ = ["AutomatonError", "Expression", "NothingMatches", "restricted"]

_Ranges = tuple[tuple[int, int], ...]  # of code points, both ends inclusive
_State = tuple[frozenset[int], ...]

_LAST = 0x10FFFF
_MAX_NODES = 20_000
_MAX_STATES = 1500
_MAX_MINIMIZED = 250
_MAX_STEPS = 1_000_000  # of nodes, about a second
_MAX_CHARS = 40_000
_MAX_KEPT_STEPS = 10_000
_TOKEN = re.compile(r"\(\?s:\.\)|\(\?:|\[\^?|\\x\{[0-9a-f]+\}|\\.|\{\d+,?\d*\}|.", re.DOTALL)
_CONTROLS = {"\\t": 9, "\\n": 10, "\\r": 13}


class AutomatonError(ValueError):
    """An expression is too large, or outside the supported dialect."""


class NothingMatches(AutomatonError):
    """No text satisfies all conditions."""


def restricted(text: str, conditions: Sequence[tuple[str, bool]]) -> str:
    """Return an expression for what matches ``text`` and each condition, or does not match a negated one.

    Args:
        conditions: expressions of whole texts, and True for those that are negated.

    Raises:
        NothingMatches: no text satisfies the conditions.
        AutomatonError: there are too many states.
    """
    machines = [_Machine.of(expression) for expression in (text, *(expression for expression, _ in conditions))]
    wanted = (True, *(not is_negated for _, is_negated in conditions))
    product = _minimized(_determinized(machines, wanted))
    if len(product.table) > _MAX_MINIMIZED:
        raise AutomatonError("too large beside look-ahead")
    return _eliminated(product)


class Expression:
    """An expression that texts are matched against as a whole, in a time linear in their length.

    Raises:
        AutomatonError: it is too large, or outside the supported dialect.
    """

    def __init__(self, text: str) -> None:
        self._machine = _Machine.of(text)

    def matches(self, text: str) -> bool:
        """Return True if all of a text matches."""
        machine = self._machine
        if len(machine.steps) > _MAX_KEPT_STEPS:
            machine.steps.clear()
        nodes = machine.closure([0])
        for char in text:
            nodes = machine.step(nodes, ord(char))
        return not nodes.isdisjoint(machine.end)


# -- from an expression to a nondeterministic automaton ------------------------------------------------


@frozen(eq=False)
class _Machine:
    """Nondeterministic automaton with transitions on characters and epsilon. Node 0 starts, ``end`` accepts."""

    moves: list[list[tuple[_Ranges, int]]] = field(factory=list)
    free: list[list[int]] = field(factory=list)
    tokens: list[str] = field(factory=list)
    end: list[int] = field(factory=list)
    steps: dict[tuple[frozenset[int], int], frozenset[int]] = field(factory=dict)

    @classmethod
    def of(cls, expression: str) -> _Machine:
        machine = cls()
        machine.tokens.extend(reversed(_TOKEN.findall(expression)))
        begin = machine._node()
        machine.end.append(machine._alternatives(begin))
        if machine.tokens:
            raise AutomatonError("unbalanced parenthesis")
        return machine

    def closure(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the epsilon closure of the nodes."""
        found = set(nodes)
        waiting = list(found)
        while waiting:
            new = [node for node in self.free[waiting.pop()] if node not in found]
            found.update(new)
            waiting += new
        return frozenset(found)

    def step(self, nodes: frozenset[int], char: int) -> frozenset[int]:
        """Return the nodes after a character. Cached: many states of a product contain the same nodes."""
        found = self.steps.get((nodes, char))
        if found is None:
            targets = {
                target
                for node in nodes
                for ranges, target in self.moves[node]
                if any(low <= char <= high for low, high in ranges)
            }
            found = self.steps[nodes, char] = self.closure(targets)
        return found

    def _node(self) -> int:
        if len(self.moves) >= _MAX_NODES:
            raise AutomatonError("too large beside look-ahead")
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def _alternatives(self, begin: int) -> int:
        end = self._node()
        while True:
            node = begin
            while self.tokens and self.tokens[-1] not in ("|", ")"):
                node = self._repeated(node)
            self.free[node].append(end)
            if not self.tokens or self.tokens[-1] == ")":
                return end
            self.tokens.pop()

    def _repeated(self, begin: int) -> int:
        """Parse one atom with its quantifier; the atom is parsed again for each repetition."""
        before = list(self.tokens)
        first = self._node()
        end = self._atom(first)
        least, most = self._counts()
        after = list(self.tokens)
        if (least, most) == (1, 1):
            self.free[begin].append(first)
            return end
        node, exits = begin, []
        for number in range(least if most is None else most):
            if number >= least:
                exits.append(node)
            node = self._again(node, before)
        if most is None:  # the loop has its own node, so that preceding nodes do not take part in it
            loop = self._node()
            self.free[node].append(loop)
            self.free[self._again(loop, before)].append(loop)
            node = loop
        for other in exits:
            self.free[other].append(node)
        self.tokens[:] = after
        return node

    def _again(self, begin: int, tokens: list[str]) -> int:
        self.tokens[:] = tokens
        first = self._node()
        self.free[begin].append(first)
        return self._atom(first)

    def _counts(self) -> tuple[int, int | None]:
        token = self.tokens[-1] if self.tokens else ""
        if token not in ("*", "+", "?") and not (token.startswith("{") and len(token) > 1):
            return 1, 1
        self.tokens.pop()
        if token.startswith("{"):
            low, comma, high = token[1:-1].partition(",")
            return int(low), int(high) if high else None if comma else int(low)
        return (1 if token == "+" else 0), (1 if token == "?" else None)

    def _atom(self, begin: int) -> int:
        token = self.tokens.pop()
        if token == "(?:":
            end = self._alternatives(begin)
            if not self.tokens or self.tokens.pop() != ")":
                raise AutomatonError("unbalanced parenthesis")
            return end
        end = self._node()
        self.moves[begin].append((self._ranges(token), end))
        return end

    def _ranges(self, token: str) -> _Ranges:
        if token == "(?s:.)":
            return ((0, _LAST),)
        if not token.startswith("["):
            char = _char(token)
            return ((char, char),)
        found: list[tuple[int, int]] = []
        while (item := self.tokens.pop()) != "]":
            if item.startswith("["):
                found += self._ranges(item)
                continue
            low = high = _char(item)
            if self.tokens[-1] == "-" and self.tokens[-2] != "]":
                self.tokens.pop()
                high = _char(self.tokens.pop())
            found.append((low, high))
        return _complement(found) if token == "[^" else tuple(found)


def _char(token: str) -> int:
    if token.startswith("\\x{"):
        return int(token[3:-1], 16)
    if token in _CONTROLS:
        return _CONTROLS[token]
    if len(token) != 1:
        raise AutomatonError(f"{token} is not supported beside look-ahead")
    return ord(token)


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    left, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return (*left, (start, _LAST)) if start <= _LAST else tuple(left)


# -- deterministic automata ----------------------------------------------------------------------------

_Table = list[list[int]]  # for each state, the next state for each interval of characters, or _DEAD
_DEAD = -1


@frozen
class _Product:
    """Product of all automata. State 0 is the start.

    Attributes:
        intervals: intervals of characters that no automaton distinguishes.
    """

    intervals: list[tuple[int, int]]
    table: _Table
    accepting: set[int]


def _determinized(machines: Sequence[_Machine], wanted: Sequence[bool]) -> _Product:
    intervals = _intervals(machines)
    start: _State = tuple(machine.closure([0]) for machine in machines)
    states, numbers = [start], {start: 0}
    table: _Table = []
    num_steps = 0
    while len(table) < len(states):
        state = states[len(table)]
        num_steps += len(intervals) * sum(map(len, state))
        if num_steps > _MAX_STEPS or len(states) > _MAX_STATES:
            raise AutomatonError("too large beside look-ahead")
        row = []
        for low, _ in intervals:
            following = tuple(machine.step(nodes, low) for machine, nodes in zip(machines, state, strict=True))
            if following not in numbers and following[0]:
                numbers[following] = len(states)
                states.append(following)
            # Once the first automaton, the expression itself, is dead, the conditions are irrelevant.
            row.append(numbers[following] if following[0] else _DEAD)
        table.append(row)
    ends = [machine.end[0] for machine in machines]
    accepting = {
        number
        for state, number in numbers.items()
        if all((end in nodes) == want for end, nodes, want in zip(ends, state, wanted, strict=True))
    }
    return _Product(intervals, table, accepting)


def _intervals(machines: Sequence[_Machine]) -> list[tuple[int, int]]:
    cuts = {0}
    for machine in machines:
        ranges = [one for moves in machine.moves for found, _ in moves for one in found]
        cuts |= {low for low, _ in ranges} | {high + 1 for _, high in ranges}
    bounds = sorted(cut for cut in cuts if cut <= _LAST)
    return list(zip(bounds, [*(bound - 1 for bound in bounds[1:]), _LAST], strict=True))


def _minimized(product: _Product) -> _Product:
    """Return the minimal equivalent automaton, without states from which nothing is accepted."""
    table, states = product.table, range(len(product.table))
    alive = set(product.accepting)
    while new := {state for state in states if state not in alive and not alive.isdisjoint(table[state])}:
        alive |= new
    if 0 not in alive:
        raise NothingMatches("no text satisfies the look-ahead")
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
    return _Product(product.intervals, small, {blocks[state] for state in product.accepting})


def _joined(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    """Sort ranges and merge adjacent ones."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


# -- back to an expression -----------------------------------------------------------------------------


def _eliminated(product: _Product) -> str:
    """Return the expression of an automaton by state elimination: paths through a removed state are replaced."""
    first, last = -1, -2
    edges: dict[tuple[int, int], str] = {(first, 0): ""}  # state 0 is in block 0, which is named first
    edges |= {(state, last): "" for state in product.accepting}
    for state, row in enumerate(product.table):
        targets: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for target, interval in zip(row, product.intervals, strict=True):
            targets[target].append(interval)
        edges |= {(state, to): _written(_joined(ranges)) for to, ranges in targets.items() if to != _DEAD}
    left = {state for edge in edges for state in edge if state >= 0}
    while left:

        def cost(state: int) -> int:
            into = sum(len(text) + 1 for (_, target), text in edges.items() if target == state)
            return into * sum(len(text) + 1 for (source, _), text in edges.items() if source == state)

        gone = min(left, key=cost)
        left.remove(gone)
        loop = edges.pop((gone, gone), None)
        around = f"(?:{loop})*" if loop else ""
        sources = [(source, edges.pop((source, gone))) for source, target in list(edges) if target == gone]
        targets_ = [(target, edges.pop((gone, target))) for source, target in list(edges) if source == gone]
        for source, before in sources:
            for target, after in targets_:
                path = _grouped(before) + around + _grouped(after)
                known = edges.get((source, target))
                edges[source, target] = path if known is None else f"{known}|{path}"
        if sum(map(len, edges.values())) > _MAX_CHARS:
            raise AutomatonError("too large beside look-ahead")
    return f"(?:{edges[first, last]})"


def _grouped(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _written(ranges: _Ranges) -> str:
    if ranges == ((0, _LAST),):
        return "(?s:.)"
    parts = []
    for low, high in ranges:
        low = 0xE000 if 0xD800 <= low < 0xE000 else low  # noqa: PLW2901 - surrogates are not characters
        high = 0xD7FF if 0xD800 <= high < 0xE000 else high  # noqa: PLW2901
        if low <= high:
            parts.append(f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}")
    return f"[{''.join(parts)}]"
