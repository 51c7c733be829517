"""Prefix reuse: finds the computed tokens that a sequence can start from, cached or running.

Used by the scheduler when a sequence is admitted. Choices of one request share their prompt in the same way as
unrelated requests share a system prompt: by forking computed tokens.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence as Neighbours

from attrs import frozen

from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import CacheFull, PluginFailed, RunnerError
from enginehouse.contract.media import whole_chunks
from enginehouse.engine.checkpoints import last_place
from enginehouse.engine.prefix_cache import PrefixCache, PrefixMatch, Truncation, common_prefix_length
from enginehouse.engine.sequence import Sequence

_log = logging.getLogger(__name__)

_MIN_DEFERRAL_TOKENS = 32
"""Minimum number of tokens that waiting for another sequence's prefill must save."""


@frozen(eq=False)
class Source:
    """``length`` computed tokens to start from, of a cached prefix or a running sequence."""

    length: int = 0
    match: PrefixMatch | None = None
    donor: Sequence | None = None


class PrefixReuse:
    """Finds and opens sources.

    Args:
        runner: forks sequences.
        cache: cached prefixes.
        shares_requests: True if different requests of a namespace may share running sequences.
    """

    def __init__(self, runner: Runner, cache: PrefixCache, shares_requests: bool) -> None:
        self._runner = runner
        self._cache = cache
        self._shares_requests = shares_requests
        self._can_fork = runner.capabilities.fork != "none"
        self._truncation = Truncation(runner)

    def find(self, sequence: Sequence, running: Neighbours[Sequence]) -> Source:
        """Return the longest source; at least one token is always left to compute, so that there are logits."""
        if sequence.scores_prompt:
            return Source()
        owner, match = sequence.owner, None
        if owner.request.cache_prompt:
            match = self._cache.match(sequence.reusable_token_ids, owner.cache_namespace)
        best = Source(match.length, match=match) if match is not None else Source()
        for other in running if self._can_fork else ():
            length = self._live_length(sequence, other)
            if length > best.length:
                best = Source(length, donor=other)
        return best

    def should_wait(self, sequence: Sequence, waiting: Neighbours[Sequence], running: Neighbours[Sequence]) -> bool:
        """Return True if a running prefill will soon hold a longer prefix of this sequence than any source now."""
        if not (self._can_fork and self._truncation.possible) or sequence.scores_prompt:
            return False
        leader, num_needed = sequence.leader, len(sequence.owner.prompt) - 1
        if leader is not sequence and leader.num_computed < num_needed and (leader in waiting or leader in running):
            return True
        prefilling = [s for s in running if s.num_remaining > 1 and self._may_share(sequence, s)]
        if not prefilling:
            return False
        soon = max(self._soon_shared(sequence, other) for other in prefilling)
        return soon - self.find(sequence, running).length >= _MIN_DEFERRAL_TOKENS

    def open(self, source: Source) -> tuple[int, int]:
        """Open a runner sequence that starts with the source; return (handle, length actually reused)."""
        try:
            if source.match is not None:
                return self._cache.open(source.match)
            if source.donor is not None and source.donor.handle is not None:
                return self._runner.fork(source.donor.handle, source.length)
        except CacheFull:
            self._cache.clear()
        except (PluginFailed, RunnerError):
            _log.warning("a computed prefix cannot be used, so it is computed again")
        return self._runner.open_sequence(), 0

    def _may_share(self, sequence: Sequence, other: Sequence) -> bool:
        """Return True for choices of one request, and for requests of one namespace if both allow it."""
        if other.owner is sequence.owner:
            return True
        mine, its = sequence.owner.request, other.owner.request
        may_share = self._shares_requests and mine.cache_prompt and its.cache_prompt
        return may_share and sequence.owner.cache_namespace == other.owner.cache_namespace

    @staticmethod
    def _limit(sequence: Sequence, other: Sequence) -> int:
        """Return the number of tokens after which the adapters of two sequences may differ."""
        mine, its = sequence.owner, other.owner
        return sys.maxsize if mine is its else min(mine.num_shareable, its.num_shareable)

    def _soon_shared(self, sequence: Sequence, other: Sequence) -> int:
        """Return the number of tokens that this sequence can fork of another one after its prefill, but not yet."""
        shared = min(common_prefix_length(sequence.token_ids[:-1], other.token_ids), self._limit(sequence, other))
        if self._truncation.keeper is None:
            return shared
        place = last_place(other.owner.places, shared, len(other.owner.prompt))
        return place if place > other.num_computed else 0  # what there is of earlier ones can be forked now

    def _live_length(self, sequence: Sequence, other: Sequence) -> int:
        """Return the number of tokens of a running sequence that this one could fork now."""
        if not self._may_share(sequence, other):
            return 0
        shared = common_prefix_length(sequence.token_ids[:-1], other.token_ids[: other.num_computed])
        shared = whole_chunks(sequence.token_ids, min(shared, self._limit(sequence, other)))
        if not shared or other.handle is None:
            return 0
        return self._truncation.kept(other.handle, other.num_computed, shared)
