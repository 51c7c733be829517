"""Prefix cache: a tree of finished sequences, from which new ones with the same prefix are forked.

Called by the scheduler. Knows token ids and sequence handles; the runner forks and truncates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import CutPlanner, Runner
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.errors import PluginFailed, RunnerError
from enginehouse.contract.inspection import PrefixView
from enginehouse.contract.media import whole_chunks


def free(runner: Runner, handle: int) -> None:
    """Free a sequence. If the runner fails, its handle is lost; its guard logs that."""
    with contextlib.suppress(PluginFailed):
        runner.free_sequence(handle)


class Truncation:
    """Truncation capabilities of one runner.

    Attributes:
        anywhere: every truncation keeps the requested length.
        possible: some truncations keep at least some tokens.
        keeper: the runner, if its sequences go back to checkpoints.
    """

    def __init__(self, runner: Runner) -> None:
        capabilities = runner.capabilities
        self.anywhere = capabilities.truncate == "any"
        # Without forks a cut would cost the rest of the sequence, which may be worth more.
        may_plan = capabilities.truncate in ("bounded", "checkpoint") and capabilities.fork != "none"
        self._planner = runner if may_plan and isinstance(runner, CutPlanner) else None
        keeps = self._planner is not None and capabilities.truncate == "checkpoint"
        self.keeper = runner if keeps and isinstance(runner, CheckpointKeeper) else None
        self.possible = self.anywhere or self._planner is not None

    def kept(self, sequence: int, num_held: int, length: int) -> int:
        """Return the number of tokens that a fork would start with.

        Args:
            sequence: its handle.
            num_held: number of its tokens.
            length: where to cut; a length beyond the end keeps all tokens.
        """
        if length >= num_held:
            return num_held
        if self.anywhere:
            return length
        with contextlib.suppress(PluginFailed):
            return self._planner.kept_length(sequence, length) if self._planner is not None else 0
        return 0

    def replaces(self, sequence: int, num_held: int, length: int) -> bool:
        """Return True if the sequence serves as well as another one that holds its first ``length`` tokens.

        A bounded cut does not: the next pass may drop state that it needs.
        """
        return self.anywhere or (self.keeper is not None and self.kept(sequence, num_held, length) == length)


Save = Callable[[NDArray[np.int32], str, int], bool]
"""Saves a sequence (token ids, namespace, handle) elsewhere; returns False if that is not possible now."""


def common_prefix_length(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of leading token ids that the two arrays share."""
    num = min(len(a), len(b))
    differs = a[:num] != b[:num]
    return int(differs.argmax()) if differs.any() else num


@define(eq=False)
class _Node:
    edge: NDArray[np.int32]  # token ids from the parent to this node
    depth: int  # number of token ids from the root to this node
    parent: _Node | None
    namespace: str
    handle: int | None = None
    last_used: int = 0
    num_hits: int = 0
    is_saved: bool = False
    children: dict[int, _Node] = field(factory=dict)

    def walk(self, without: _Node | None = None) -> Iterator[_Node]:
        """Iterate over this node and its descendants, except the subtree of the child ``without``."""
        yield self
        for child in self.children.values():
            if child is not without:
                yield from child.walk()

    def path(self) -> NDArray[np.int32]:
        """Return all token ids from the root to this node."""
        edges, node = [self.edge], self.parent
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])


@frozen(eq=False)
class PrefixMatch:
    """A reusable prefix: the first ``length`` tokens of the node's handle."""

    node: _Node
    length: int


@frozen
class Divergence:
    """The position where a prompt diverges from the cached sequence with the longest shared prefix.

    Attributes:
        index: index of the first token that differs, 0-based.
        expected: token id of the cached sequence at this index; None if it ends there.
    """

    index: int
    expected: int | None


class PrefixCache:
    """Finished sequences by their token ids. Owns their runner handles.

    Args:
        runner: owner of the sequences.
        enabled: if False, nothing is stored and nothing matches.
        save: called before a sequence is evicted, and by :meth:`save_next`.
    """

    def __init__(self, runner: Runner, enabled: bool = True, save: Save | None = None) -> None:
        self._runner = runner
        self._save = save
        self._enabled = enabled
        self._truncation = Truncation(runner)
        self._roots: dict[str, _Node] = {}
        self._holders: set[_Node] = set()
        self._clock = 0

    def __len__(self) -> int:
        """Number of handles held."""
        return len(self._holders)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all trees; shared prefixes count once."""
        return sum(len(node.edge) for root in self._roots.values() for node in root.walk())

    def entries(self) -> Iterator[PrefixView]:
        """Iterate over the cached sequences, most recently used first."""
        for node in sorted(self._holders, key=lambda node: -node.last_used):
            yield PrefixView(node.namespace, node.depth, node.num_hits)

    def match(self, token_ids: NDArray[np.int32], namespace: str) -> PrefixMatch | None:
        """Return the longest reusable prefix of ``token_ids``; updates only its last use.

        Returns:
            None if not even one token can be reused.
        """
        found = self._find(token_ids, namespace)
        if found is not None:
            self._touch(found.node)
        return found

    def reusable_length(self, token_ids: NDArray[np.int32], namespace: str) -> int:
        """Return the length of the longest reusable prefix of ``token_ids``; changes nothing."""
        found = self._find(token_ids, namespace)
        return found.length if found is not None else 0

    def _find(self, token_ids: NDArray[np.int32], namespace: str) -> PrefixMatch | None:
        root = self._roots.get(namespace)
        if root is None:
            return None
        node, depth = self._descend(root, token_ids)
        depth = whole_chunks(token_ids, depth)
        while node.parent is not None and depth <= node.parent.depth:
            node = node.parent
        return self._longest(node, depth)

    def divergence(self, token_ids: NDArray[np.int32], namespace: str) -> Divergence | None:
        """Return where ``token_ids`` diverges from this namespace's tree; None if it does not or the tree is empty."""
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
        """Return the handle that keeps the longest prefix of the path to ``depth``, which ends in ``node``.

        Considers all handles on the path and below it.
        """
        best, below, upper = None, None, node
        while depth > (best.length if best is not None else 0):
            for holder in upper.walk(without=below):
                if holder.handle is None:
                    continue
                length = self._truncation.kept(holder.handle, holder.depth, depth)
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
        """Follow the tokens down the tree; return the last node and the number of tokens matched."""
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
        """Open a runner sequence that starts with the match; return (handle, length actually reused).

        Where forking would copy it, a handle that is a prefix of the match is moved out of the cache instead.

        Raises:
            CacheFull: no space for a fork.
            PluginFailed, RunnerError: the runner failed.
        """
        node, fork = match.node, self._runner.capabilities.fork
        assert node.handle is not None
        node.num_hits += 1
        if fork == "share" or (fork == "copy" and node.depth > match.length):
            return self._runner.fork(node.handle, match.length)
        handle = self._remove(node)
        if node.depth == match.length:
            return handle, match.length
        try:
            return handle, self._runner.truncate(handle, match.length)
        except (PluginFailed, RunnerError):
            free(self._runner, handle)
            raise

    @property
    def is_enabled(self) -> bool:
        """True if sequences are kept."""
        return self._enabled

    def store(self, token_ids: NDArray[np.int32], handle: int, namespace: str, *, is_saved: bool = False) -> None:
        """Take over a sequence that holds exactly ``token_ids``; frees handles that become redundant.

        Args:
            token_ids, handle, namespace: the sequence.
            is_saved: True if it is also saved elsewhere.
        """
        if not self._enabled or not len(token_ids):
            free(self._runner, handle)
            return
        node = self._insert(token_ids.copy(), namespace)
        # With checkpoints the newer one is kept: those of the old one may have been dropped.
        old = node.handle if self._truncation.keeper is not None else None
        holders = [one for one in node.walk() if one.handle is not None and one.handle != old]
        if any(holder is node or self._replaces(holder, node) for holder in holders):
            free(self._runner, handle)
            for holder in holders:
                self._touch(holder)
            return
        if old is not None:
            free(self._runner, old)
        node.handle, node.is_saved = handle, is_saved
        self._holders.add(node)
        self._touch(node)
        self._free_ancestors(node)

    def evict(self, keep: PrefixMatch | None = None) -> bool:
        """Free the least recently used handle other than ``keep``'s; returns False if there is none."""
        victims = [node for node in self._holders if keep is None or node is not keep.node]
        if not victims:
            return False
        victim = min(victims, key=lambda node: node.last_used)
        if self._save is not None and not victim.is_saved:
            assert victim.handle is not None
            self._save(victim.path(), victim.namespace, victim.handle)
        free(self._runner, self._remove(victim))
        return True

    def has_unsaved(self, min_tokens: int) -> bool:
        """Return True if an unsaved sequence has at least ``min_tokens`` tokens."""
        return any(not node.is_saved and node.depth >= min_tokens for node in self._holders)

    def save_next(self, min_tokens: int) -> bool:
        """Save the most recently used unsaved sequence; returns False if there is none or it cannot be saved now."""
        unsaved = [node for node in self._holders if not node.is_saved and node.depth >= min_tokens]
        if self._save is None or not unsaved:
            return False
        node = max(unsaved, key=lambda node: node.last_used)
        assert node.handle is not None
        node.is_saved = self._save(node.path(), node.namespace, node.handle)
        return node.is_saved

    def clear(self) -> None:
        """Free all handles."""
        while self.evict():
            pass

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _insert(self, token_ids: NDArray[np.int32], namespace: str) -> _Node:
        """Return the node whose path is ``token_ids``; creates and splits nodes as needed."""
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
        """Insert a node at offset ``at`` of the edge that leads to ``node``."""
        parent = node.parent
        assert parent is not None
        middle = _Node(node.edge[:at], node.depth - len(node.edge) + at, parent, node.namespace)
        parent.children[int(node.edge[0])] = middle
        node.edge, node.parent = node.edge[at:], middle
        middle.children[int(node.edge[0])] = node
        return middle

    def _replaces(self, holder: _Node, node: _Node) -> bool:
        """Return True if the handle of ``holder``, a node below, makes one of ``node`` redundant."""
        return holder.handle is not None and self._truncation.replaces(holder.handle, holder.depth, node.depth)

    def _free_ancestors(self, node: _Node) -> None:
        ancestor = node.parent
        while ancestor is not None:
            if ancestor.handle is not None and self._replaces(node, ancestor):
                node.num_hits += ancestor.num_hits
                free(self._runner, ancestor.handle)
                ancestor.handle = None
                self._holders.discard(ancestor)
            ancestor = ancestor.parent

    def _remove(self, node: _Node) -> int:
        """Take the handle out of ``node`` and prune empty branches."""
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
