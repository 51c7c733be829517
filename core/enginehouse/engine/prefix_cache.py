"""Prefix cache: a tree of kept sequences, which new ones with the same beginning are forked from.

Called by the scheduler. Knows token ids and sequence handles; the runner forks and truncates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import CutPlanner, Runner
from enginehouse.contract.inspection import PrefixView

__all__ = ["Cuts", "Divergence", "PrefixCache", "PrefixMatch", "Save", "common_prefix_length"]


class Cuts:
    """Answers for one runner.

    Attributes:
        anywhere: every cut keeps what is asked for.
        possible: some cuts keep something.
    """

    def __init__(self, runner: Runner) -> None:
        capabilities = runner.capabilities
        self.anywhere = capabilities.truncate == "any"
        # Without forks a cut would be paid for with the rest of the sequence, which may be worth more.
        may_plan = capabilities.truncate == "bounded" and capabilities.fork != "none"
        self._planner = runner if may_plan and isinstance(runner, CutPlanner) else None
        self.possible = self.anywhere or self._planner is not None

    def kept(self, sequence: int, num_held: int, length: int) -> int:
        """Tokens that a fork would start with.

        Args:
            sequence: its handle.
            num_held: tokens that it holds.
            length: where to cut; what lies behind the end keeps it whole.
        """
        if length >= num_held:
            return num_held
        if self.anywhere:
            return length
        return self._planner.kept_length(sequence, length) if self._planner is not None else 0


Save = Callable[[NDArray[np.int32], str, int], bool]
"""Keeps the sequence of these token ids, namespace and handle elsewhere; False when it cannot now."""


def common_prefix_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading token ids the two arrays share."""
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    return int(differs.argmax()) if differs.any() else num


@define(eq=False)
class _Node:
    edge: NDArray[np.int32]  # token ids from the parent to here
    depth: int  # token ids from the root to here
    parent: _Node | None
    namespace: str
    handle: int | None = None
    last_used: int = 0
    num_hits: int = 0
    is_saved: bool = False
    children: dict[int, _Node] = field(factory=dict)

    def walk(self, without: _Node | None = None) -> Iterator[_Node]:
        """This node and all below it; perhaps without a child and what is below that."""
        yield self
        for child in self.children.values():
            if child is not without:
                yield from child.walk()

    def path(self) -> NDArray[np.int32]:
        """All token ids from the root to here."""
        edges, node = [self.edge], self.parent
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])


@frozen(eq=False)
class PrefixMatch:
    """A reusable beginning: ``length`` tokens held by the node's handle."""

    node: _Node
    length: int


@frozen
class Divergence:
    """Where a prompt leaves the kept sequence that it shares the most with.

    Attributes:
        index: of the first token that differs, 0-based.
        expected: the token id that the kept sequence has there; None: it ends there.
    """

    index: int
    expected: int | None


class PrefixCache:
    """Finished sequences by their token ids. Owns the handles that it holds.

    Args:
        runner: whose sequences are kept.
        enabled: when False nothing is kept and nothing matches.
        save: called before a sequence is evicted, and by :meth:`save_next`.
    """

    def __init__(self, runner: Runner, enabled: bool = True, save: Save | None = None) -> None:
        self._runner = runner
        self._save = save
        self._enabled = enabled
        self._cuts = Cuts(runner)
        self._roots: dict[str, _Node] = {}
        self._holders: set[_Node] = set()
        self._clock = 0

    def __len__(self) -> int:
        """Number of handles held."""
        return len(self._holders)

    @property
    def num_tokens(self) -> int:
        """Tokens reachable in all trees; shared beginnings count once."""
        return sum(len(node.edge) for root in self._roots.values() for node in root.walk())

    def entries(self) -> Iterator[PrefixView]:
        """What is held, the last used first."""
        for node in sorted(self._holders, key=lambda node: -node.last_used):
            yield PrefixView(node.namespace, node.depth, node.num_hits)

    def match(self, token_ids: NDArray[np.int32], namespace: str) -> PrefixMatch | None:
        """The longest reusable beginning of ``token_ids``; changes nothing but its last use.

        Returns:
            None when not even one token can be reused.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None
        found = self._longest(*self._descend(root, token_ids))
        if found is not None:
            self._touch(found.node)
        return found

    def divergence(self, token_ids: NDArray[np.int32], namespace: str) -> Divergence | None:
        """Where ``token_ids`` leaves what is kept in this namespace; None when it does not, or nothing is kept."""
        root = self._roots.get(namespace)
        if root is None:
            return None
        node, depth = self._descend(root, token_ids)
        if depth == len(token_ids):
            return None
        if depth < node.depth:
            return Divergence(depth, int(node.edge[depth - node.depth]))
        if node.handle is not None or not node.children:
            return Divergence(depth, None)
        newest = max(node.children.values(), key=lambda child: max(n.last_used for n in child.walk()))
        return Divergence(depth, int(newest.edge[0]))

    def _longest(self, node: _Node, depth: int) -> PrefixMatch | None:
        """Of the handles at and below the path to ``depth``, which ends in ``node``, the one that keeps most of it."""
        best, below, upper = None, None, node
        while depth > (best.length if best is not None else 0):
            for holder in upper.walk(without=below):
                if holder.handle is None:
                    continue
                length = self._cuts.kept(holder.handle, holder.depth, depth)
                if length > (best.length if best is not None else 0):
                    best = PrefixMatch(holder, length)
                if length == depth:
                    break
            assert upper.parent is not None, "at the root no depth is left"
            below, upper = upper, upper.parent
            depth = upper.depth
        return best

    @staticmethod
    def _descend(root: _Node, token_ids: NDArray[np.int32]) -> tuple[_Node, int]:
        """The node that the tokens lead into, and how many of them are in the tree."""
        node, depth = root, 0
        while depth < len(token_ids):
            child = node.children.get(int(token_ids[depth]))
            if child is None:
                break
            shared = common_prefix_length(child.edge, token_ids[depth:])
            node, depth = child, depth + shared
            if shared < len(child.edge):
                break
        return node, depth

    def open(self, match: PrefixMatch) -> tuple[int, int]:
        """A runner sequence that starts with the match: (handle, length really reused).

        A handle that lies wholly inside the match is moved out of the cache when forking would copy it.

        Raises:
            CacheFull: no room for a fork.
        """
        node, fork = match.node, self._runner.capabilities.fork
        assert node.handle is not None
        node.num_hits += 1
        if fork == "share" or (fork == "copy" and node.depth > match.length):
            return self._runner.fork(node.handle, match.length)
        handle = self._remove(node)
        if node.depth == match.length:
            return handle, match.length
        return handle, self._runner.truncate(handle, match.length)

    def store(self, token_ids: NDArray[np.int32], handle: int, namespace: str, *, is_saved: bool = False) -> None:
        """Take over a sequence that holds exactly ``token_ids``; frees handles that this makes redundant.

        Args:
            token_ids, handle, namespace: the sequence.
            is_saved: it is kept elsewhere, too.
        """
        if not self._enabled or not len(token_ids):
            self._runner.free_sequence(handle)
            return
        node = self._insert(token_ids.copy(), namespace)
        covered = node.handle is not None or (self._cuts.anywhere and any(n.handle is not None for n in node.walk()))
        if covered:
            self._runner.free_sequence(handle)
            for holder in node.walk():
                if holder.handle is not None:
                    self._touch(holder)
            return
        node.handle, node.is_saved = handle, is_saved
        self._holders.add(node)
        self._touch(node)
        if self._cuts.anywhere:  # else the next pass may take away what a cut here needs
            self._free_ancestors(node)

    def evict(self, keep: PrefixMatch | None = None) -> bool:
        """Free the least recently used handle other than ``keep``'s; False when there is none."""
        victims = [node for node in self._holders if keep is None or node is not keep.node]
        if not victims:
            return False
        victim = min(victims, key=lambda node: node.last_used)
        if self._save is not None and not victim.is_saved:
            assert victim.handle is not None
            self._save(victim.path(), victim.namespace, victim.handle)
        self._runner.free_sequence(self._remove(victim))
        return True

    def has_unsaved(self, min_tokens: int) -> bool:
        """Whether a sequence of at least so many tokens is kept here only."""
        return any(not node.is_saved and node.depth >= min_tokens for node in self._holders)

    def save_next(self, min_tokens: int) -> bool:
        """Save the last used sequence that is kept here only; False when there is none, or it cannot be saved now."""
        unsaved = [node for node in self._holders if not node.is_saved and node.depth >= min_tokens]
        if self._save is None or not unsaved:
            return False
        node = max(unsaved, key=lambda node: node.last_used)
        assert node.handle is not None
        node.is_saved = self._save(node.path(), node.namespace, node.handle)
        return node.is_saved

    def clear(self) -> None:
        """Free everything."""
        while self.evict():
            pass

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _insert(self, token_ids: NDArray[np.int32], namespace: str) -> _Node:
        """The node whose path is ``token_ids``, made and split from others as needed."""
        node = self._roots.setdefault(namespace, _Node(np.empty(0, np.int32), 0, None, namespace))
        while node.depth < len(token_ids):
            rest = token_ids[node.depth :]
            child = node.children.get(int(rest[0]))
            if child is None:
                child = _Node(rest, len(token_ids), node, namespace)
                node.children[int(rest[0])] = child
                return child
            shared = common_prefix_length(child.edge, rest)
            node = child if shared == len(child.edge) else self._split(child, shared)
        return node

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        """Put a node into the middle of the edge that leads to ``node``."""
        parent = node.parent
        assert parent is not None
        middle = _Node(node.edge[:at], node.depth - len(node.edge) + at, parent, node.namespace)
        parent.children[int(node.edge[0])] = middle
        node.edge, node.parent = node.edge[at:], middle
        middle.children[int(node.edge[0])] = node
        return middle

    def _free_ancestors(self, node: _Node) -> None:
        ancestor = node.parent
        while ancestor is not None:
            if ancestor.handle is not None:
                node.num_hits += ancestor.num_hits
                self._runner.free_sequence(ancestor.handle)
                ancestor.handle = None
                self._holders.discard(ancestor)
            ancestor = ancestor.parent

    def _remove(self, node: _Node) -> int:
        """Take the handle out of ``node`` and prune branches that hold nothing."""
        handle = node.handle
        assert handle is not None
        node.handle = None
        self._holders.discard(node)
        while node.parent is not None and node.handle is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is None and not node.children:
            del self._roots[node.namespace]
        return handle
