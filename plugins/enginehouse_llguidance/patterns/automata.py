r"""Automata of regular expressions, and texts that are matched against them.

Reads the dialect that ``translating`` writes: the library's, besides ``^`` and ``$`` for the ends of the text, and
look-around. Called where values are evaluated, and by ``intersections``.

Source: Thompson's construction; look-around in linear time from Barriere and Pit-Claudel, "Linear Matching of
JavaScript Regular Expressions" (2024): assertions are evaluated at all places of a text, inner ones first, and those
that look ahead from the end of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property

from attrs import define, field, frozen

from enginehouse_llguidance.patterns.characters import LAST, Ranges, category_ranges, complement, has_char, joined

__all__ = ["AutomatonError", "Expression", "Guard", "Machine", "read_atom"]

_MAX_NODES = 20_000
_MAX_KEPT_STEPS = 10_000
_MAX_VISITED = 1_000_000  # nodes, to match one text: half a second
_OPENING = ("(?:", "(?=", "(?!", "(?<=", "(?<!")
_TOKEN = re.compile(
    r"\(\?s:\.\)|\(\?:|\(\?<?[=!]|\[\^?|\\x\{[0-9a-f]+\}|\\[pP]\{[\w=]+\}|\\.|\{\d+,?\d*\}|.", re.DOTALL
)
_CONTROLS = {"\\t": 9, "\\n": 10, "\\r": 13}


class AutomatonError(ValueError):
    """An expression is too large, or outside the supported dialect."""


class Expression:
    """An expression that texts are matched against as a whole, in a time linear in their length.

    Raises:
        AutomatonError: it is too large, or outside the supported dialect.
    """

    def __init__(self, text: str) -> None:
        self._machine = Machine.of(text)

    @property
    def size(self) -> int:
        """Number of nodes of the automaton."""
        return self._machine.size

    def matches(self, text: str) -> bool:
        """Return True if all of a text matches. Raises AutomatonError if that takes too long."""
        return self._machine.reached(text, _Left(_MAX_VISITED))[-1]


@define
class _Left:
    """What is left of a limit."""

    number: int

    def take(self, number: int) -> None:
        self.number -= number
        if self.number < 0:
            raise AutomatonError("an expression is too large for a text")


@frozen(eq=False)
class Guard:
    """An assertion: look-around, or the start or end of the text if there is no machine."""

    machine: Machine | None
    is_ahead: bool
    is_negated: bool = False

    def places(self, text: str, left: _Left) -> list[bool]:
        """Return for each place of a text, its end included, if it holds there."""
        if self.machine is None:
            edge = len(text) if self.is_ahead else 0
            return [place == edge for place in range(len(text) + 1)]
        found = self.machine.reached(text, left, anywhere=True, backwards=self.is_ahead)
        return [one != self.is_negated for one in found]


@define(eq=False, slots=False)
class Machine:
    """Nondeterministic automaton with transitions on characters and epsilon. Node 0 starts, ``end`` accepts.

    Attributes:
        moves: for each node, the transitions on characters.
        free: for each node, those on nothing.
        guarded: for each node, those on nothing where an assertion holds, by its index in ``guards``.
    """

    guards: list[Guard] = field(factory=list)
    moves: list[list[tuple[Ranges, int]]] = field(factory=list)
    free: list[list[int]] = field(factory=list)
    guarded: dict[int, list[tuple[int, int]]] = field(factory=dict)
    start: int = 0
    end: int = 0
    steps: dict[tuple[frozenset[int], int, int], frozenset[int]] = field(factory=dict)
    begins: dict[int, frozenset[int]] = field(factory=dict)

    @classmethod
    def of(cls, expression: str) -> Machine:
        """Build the automaton of an expression. Raises AutomatonError."""
        return _Builder(list(reversed(_TOKEN.findall(expression))), _Left(_MAX_NODES)).whole()

    @property
    def size(self) -> int:
        """Number of nodes, with those of assertions."""
        return len(self.moves) + sum(guard.machine.size for guard in self.guards if guard.machine is not None)

    def node(self) -> int:
        """Add a node."""
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def closure(self, nodes: Iterable[int], holding: int = 0) -> frozenset[int]:
        """Return the nodes and those that follow on nothing.

        Args:
            holding: bits of the assertions that hold.
        """
        found = set(nodes)
        waiting = list(found)
        while waiting:
            node = waiting.pop()
            passed = [target for guard, target in self.guarded.get(node, ()) if holding >> guard & 1]
            new = [other for other in (*self.free[node], *passed) if other not in found]
            found.update(new)
            waiting += new
        return frozenset(found)

    def step(self, nodes: frozenset[int], char: int, holding: int = 0) -> frozenset[int]:
        """Return the nodes after a character. Cached for all characters that no transition tells from it."""
        key = (nodes, bisect_right(self._bounds, char), holding)
        found = self.steps.get(key)
        if found is None:
            if len(self.steps) > _MAX_KEPT_STEPS:
                self.steps.clear()
            found = self.steps[key] = self.closure(self.targets(nodes, char), holding)
        return found

    def targets(self, nodes: Iterable[int], char: int) -> set[int]:
        """Return the nodes right after a character."""
        return {target for node in nodes for ranges, target in self.moves[node] if has_char(ranges, char)}

    def reached(self, text: str, left: _Left, *, anywhere: bool = False, backwards: bool = False) -> list[bool]:
        """Return for each place of a text, its end included, if a match ends there; backwards, if one begins there.

        Args:
            anywhere: the other end of a match may be at any place.
        """
        machine = self._turned if backwards else self
        holds = [guard.places(text, left) for guard in self.guards]
        places = range(len(text), -1, -1) if backwards else range(len(text) + 1)
        found = [False] * (len(text) + 1)
        nodes: frozenset[int] = frozenset()
        for count, place in enumerate(places):
            left.take(1 + len(nodes))
            holding = sum(one[place] << index for index, one in enumerate(holds))
            if count:
                nodes = machine.step(nodes, ord(text[place - (not backwards)]), holding)
            if anywhere or not count:
                nodes |= machine._begin(holding)
            found[place] = machine.end in nodes
        return found

    def _begin(self, holding: int) -> frozenset[int]:
        if holding not in self.begins:
            self.begins[holding] = self.closure({self.start}, holding)
        return self.begins[holding]

    @cached_property
    def _bounds(self) -> list[int]:
        """The characters at which ranges of the transitions begin, and those after their ends."""
        sets = {ranges for moves in self.moves for ranges, _ in moves}
        return sorted({bound for ranges in sets for low, high in ranges for bound in (low, high + 1)})

    @cached_property
    def _turned(self) -> Machine:
        """The automaton of the reversed texts; assertions are about places, so that they stay."""
        turned = Machine(self.guards, [[] for _ in self.moves], [[] for _ in self.free], {}, self.end, self.start)
        for node, moves in enumerate(self.moves):
            for ranges, target in moves:
                turned.moves[target].append((ranges, node))
        for node, targets in enumerate(self.free):
            for target in targets:
                turned.free[target].append(node)
        for node, pairs in self.guarded.items():
            for guard, target in pairs:
                turned.guarded.setdefault(target, []).append((guard, node))
        return turned


@define
class _Builder:
    """Parser of one expression; ``tokens`` are in reverse order."""

    tokens: list[str]
    left: _Left
    machine: Machine = field(factory=Machine)
    known: dict[tuple[str, ...], int] = field(factory=dict)  # assertions by their tokens

    def whole(self) -> Machine:
        begin = self._node()
        self.machine.end = self._alternatives(begin)
        if self.tokens:
            raise AutomatonError("unbalanced parenthesis")
        return self.machine

    def _node(self) -> int:
        self.left.take(1)
        return self.machine.node()

    def _alternatives(self, begin: int) -> int:
        end = self._node()
        while True:
            node = begin
            while self.tokens and self.tokens[-1] not in ("|", ")"):
                node = self._repeated(node)
            self.machine.free[node].append(end)
            if not self.tokens or self.tokens[-1] == ")":
                return end
            self.tokens.pop()

    def _repeated(self, begin: int) -> int:
        """Parse one atom with its quantifier; the atom is parsed again for each repetition."""
        before = list(self.tokens)
        first = self._node()
        end = self._atom(first)
        least, most = self.counts()
        after = list(self.tokens)
        free = self.machine.free
        if (least, most) == (1, 1):
            free[begin].append(first)
            return end
        node, exits = begin, []
        for number in range(least if most is None else most):
            if number >= least:
                exits.append(node)
            node = self._again(node, before)
        if most is None:  # the loop has its own node, so that preceding nodes do not take part in it
            loop = self._node()
            free[node].append(loop)
            free[self._again(loop, before)].append(loop)
            node = loop
        for other in exits:
            free[other].append(node)
        self.tokens[:] = after
        return node

    def _again(self, begin: int, tokens: list[str]) -> int:
        self.tokens[:] = tokens
        first = self._node()
        self.machine.free[begin].append(first)
        return self._atom(first)

    def counts(self) -> tuple[int, int | None]:
        """Consume a quantifier; return how often it repeats at least and at most."""
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
        if token in ("^", "$") or token in _OPENING:
            self.machine.guarded.setdefault(begin, []).append((self._guard(token), end))
        else:
            self.machine.moves[begin].append((self.ranges(token), end))
        return end

    def _guard(self, token: str) -> int:
        """Return the index of the assertion that a token begins."""
        inner = self._to_parenthesis() if token in _OPENING else []
        key = (token, *inner)
        if key not in self.known:
            machine = _Builder(inner[::-1], self.left).whole() if token in _OPENING else None
            self.known[key] = len(self.machine.guards)
            is_ahead = token == "$" or (token in _OPENING and "<" not in token)
            self.machine.guards.append(Guard(machine, is_ahead, token.endswith("!")))
        return self.known[key]

    def _to_parenthesis(self) -> list[str]:
        found: list[str] = []
        depth = 1
        while self.tokens:
            token = self.tokens.pop()
            depth += (token in _OPENING) - (token == ")")
            if not depth:
                return found
            found.append(token)
        raise AutomatonError("unbalanced parenthesis")

    def ranges(self, token: str) -> Ranges:
        """Return the characters that an atom matches; a set is consumed after its first token."""
        if token == "(?s:.)":
            return ((0, LAST),)
        if token.startswith(("\\p", "\\P")):
            found = category_ranges(token[3:-1])
            if not found:
                raise AutomatonError(f"{token} is only supported where all of a text has one expression")
            return found if token[1] == "p" else complement(found)
        if not token.startswith("["):
            char = _char(token)
            return ((char, char),)
        inside: list[tuple[int, int]] = []
        while (item := self.tokens.pop()) != "]":
            if item.startswith("[") or item.startswith(("\\p", "\\P")):
                inside += self.ranges(item)
                continue
            low = high = _char(item)
            if self.tokens[-1] == "-" and self.tokens[-2] != "]":
                self.tokens.pop()
                high = _char(self.tokens.pop())
            inside.append((low, high))
        return complement(tuple(inside)) if token == "[^" else joined(inside)


def _char(token: str) -> int:
    if token.startswith("\\x{"):
        return int(token[3:-1], 16)
    if token in _CONTROLS:
        return _CONTROLS[token]
    if len(token) != 1:
        raise AutomatonError(f"{token} is not supported in an automaton")
    return ord(token)


def read_atom(text: str) -> tuple[Ranges, int, int | None]:
    """Return the characters of an expression for one, and how often it is repeated. Raises AutomatonError."""
    builder = _Builder(list(reversed(_TOKEN.findall(text))), _Left(_MAX_NODES))
    ranges = builder.ranges(builder.tokens.pop())
    return ranges, *builder.counts()
