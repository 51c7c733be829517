"""Scheduler: which sequences run in the next step, and with which tokens.

Fair queueing by a virtual token counter per caller: a caller that was idle starts at the minimum of the waiting
callers, so idle time earns no credit. Called by the loop. Knows no tensors and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
from attrs import frozen

from enginehouse.contract.backend import LastSampled, Outputs, Runner, Span
from enginehouse.contract.types import CacheMiss, EngineSettings
from enginehouse.engine.disk import DiskTier, Recall
from enginehouse.engine.prefix_cache import PrefixCache
from enginehouse.engine.reuse import PrefixReuse, Source
from enginehouse.engine.sequence import ActiveRequest, Sequence

__all__ = ["Batch", "FairShares", "Scheduler"]

_PROMPT_WEIGHT = 1
_ANSWER_WEIGHT = 2
"""A generated token costs about two of a prompt; the paper's weights, which are those of usual prices."""

_MAX_CALLERS = 1024


class FairShares:
    """What each caller has been given, in weighted tokens."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._last: str | None = None  # who started last

    def of(self, caller: str) -> float:
        """What a caller has been given; the least is next."""
        return self._given.get(caller, 0.0)

    def arrive(self, caller: str, waiting: Collection[str]) -> None:
        """A request of ``caller`` begins to wait beside those of ``waiting``."""
        if caller in waiting:
            return
        if waiting:
            least = min(self.of(other) for other in waiting)
        else:
            least = self.of(self._last) if self._last is not None else 0.0
        self._forget(least, waiting)
        self._given[caller] = max(self.of(caller), least)

    def start(self, caller: str, num_tokens: int) -> None:
        """A sequence of ``caller`` starts; so many tokens of its prompt must be computed."""
        self._given[caller] = self.of(caller) + _PROMPT_WEIGHT * num_tokens
        self._last = caller

    def generated(self, caller: str, num_tokens: int) -> None:
        """So many tokens were generated for ``caller``."""
        self._given[caller] = self.of(caller) + _ANSWER_WEIGHT * num_tokens

    def _forget(self, least: float, waiting: Collection[str]) -> None:
        """Drop the counts that say no more than a new caller's would: names may be ever new ones."""
        if len(self._given) >= _MAX_CALLERS:
            self._given = {
                name: given
                for name, given in self._given.items()
                if given > least or name in waiting or name == self._last
            }


_log = logging.getLogger(__name__)

_HEADROOM_TOKENS = 64
"""A sequence enters when its tokens and this many more fit, so that it is not preempted at once."""


@frozen(eq=False)
class Batch:
    """One forward pass: ``spans[i]`` belongs to ``sequences[i]``."""

    sequences: tuple[Sequence, ...]
    spans: tuple[Span, ...]


class Scheduler:
    """Owns the waiting and running sequences and their runner handles.

    Attributes:
        is_in_doubt: a pass has failed, and it is not known yet what it has computed.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, disk: DiskTier | None = None) -> None:
        self.runner = runner
        self.settings = settings
        self.cache = PrefixCache(runner, settings.prefix_cache, disk.save if disk is not None else None)
        self._recall = Recall(disk, self.cache) if disk is not None else None
        self._reuse = PrefixReuse(runner, self.cache, settings.prefix_cache)
        self._shares = FairShares()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.is_in_doubt = False
        self.slots = min(settings.slots, runner.capabilities.max_sequences)
        usual = runner.capabilities.prefill_chunk_tokens
        self._chunk_tokens = settings.prefill_chunk_tokens or usual
        self._prefill_tokens = settings.max_prefill_tokens or max(2 * usual, self._chunk_tokens)
        self._prefill_turn = True

    @property
    def num_waiting_requests(self) -> int:
        """Requests of which nothing has started yet."""
        return sum(1 for sequence in self.waiting if sequence is sequence.leader and sequence.owner.started_s is None)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts of which nothing has started yet."""
        return sum(
            len(sequence.owner.prompt)
            for sequence in tuple(self.waiting)
            if sequence is sequence.leader and sequence.owner.started_s is None
        )

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Put sequences in line: by priority, those that ran before first, then callers in turn, then by arrival."""
        for sequence in sequences:
            self._shares.arrive(sequence.owner.request.caller, self._waiting_callers())
            self.waiting.append(sequence)
        self.waiting.sort(key=self._place)

    def overdue(self, now: float) -> list[ActiveRequest]:
        """Requests of which nothing has started in the time that they may wait."""
        return [
            sequence.owner
            for sequence in self.waiting
            if sequence is sequence.leader and sequence.owner.is_overdue(now)
        ]

    def _place(self, sequence: Sequence) -> tuple[float, ...]:
        """Sort key in the line of those that wait."""
        owner = sequence.owner
        given = self._shares.of(owner.request.caller)
        return (owner.request.priority, sequence.num_generated == 0, given, owner.arrival, sequence.choice)

    def _waiting_callers(self) -> set[str]:
        return {sequence.owner.request.caller for sequence in self.waiting}

    # -- admission ---------------------------------------------------------------------------------

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while slots and KV positions last; returns those started."""
        started: list[Sequence] = []
        while len(self.running) < self.slots and self.waiting:
            several = len(self._waiting_callers()) > 1
            if several:
                self._put_in_line()
            if not self._start_next(started, only_one=several):
                break
        return started

    def _put_in_line(self) -> None:
        """Sort those that wait by what their callers have been given up to now."""
        for sequence in self.running:
            self._count_generated(sequence)
        self.waiting.sort(key=self._place)

    def _start_next(self, started: list[Sequence], *, only_one: bool) -> bool:
        """Start sequences in line, or only one, after which the line may be another; whether more may start."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.slots:
                return False
            if self._reuse.should_wait(sequence, self.waiting, self.running):
                continue
            if self._recall is not None and self._waits_for_disk(sequence, self._recall):
                continue
            if not self._start(sequence):
                return False
            self.waiting.remove(sequence)
            self.running.append(sequence)
            started.append(sequence)
            self._shares.start(sequence.owner.request.caller, sequence.length - sequence.num_computed)
            if only_one:
                return True
        return False

    def _count_generated(self, sequence: Sequence) -> None:
        """Count what was generated since the last time for its caller."""
        more = sequence.num_generated - sequence.num_counted
        sequence.num_counted = sequence.num_generated
        if more:
            self._shares.generated(sequence.owner.request.caller, more)

    def _waits_for_disk(self, sequence: Sequence, recall: Recall) -> bool:
        """Whether a beginning of the sequence is being read; waits for it when nothing else can be done."""
        request = sequence.owner.request
        if not sequence.has_asked_disk:
            sequence.has_asked_disk = True
            if request.cache_prompt and not sequence.scores_prompt:
                num_held = self._reuse.find(sequence, self.running).length
                sequence.disk_read = recall.begin(sequence.token_ids[:-1], request.namespace, num_held)
        read = sequence.disk_read
        if read is None:
            return False
        return not recall.is_over(read, request.namespace, len(self.running), waits=not self.running)

    def _start(self, sequence: Sequence) -> bool:
        """Give the sequence a runner handle with as much of it computed as can be reused."""
        source = self._reuse.find(sequence, self.running)
        self._explain(sequence.owner)
        if not self._fit(sequence, source):
            if self.running:
                return False
            self.cache.clear()  # alone, a sequence fits into an empty cache
            source = Source()
        sequence.handle, sequence.num_computed = self._reuse.open(source)
        owner = sequence.owner
        if owner.num_cached_tokens is None:
            owner.num_cached_tokens = min(sequence.num_computed, len(owner.prompt) - 1)
            if sequence.disk_read is not None:
                owner.num_loaded_tokens = max(owner.num_cached_tokens - sequence.disk_read.num_held, 0)
        sequence.disk_read = None
        return True

    def _explain(self, owner: ActiveRequest) -> None:
        """Note where the prompt leaves what is kept, once."""
        if owner.num_cached_tokens is not None or not owner.request.cache_prompt:
            return
        found = self.cache.divergence(owner.prompt, owner.request.namespace)
        if found is not None:
            token_bytes = self.runner.tokenizer.token_bytes
            expected = None if found.expected is None else token_bytes[found.expected]
            owner.cache_miss = CacheMiss(found.index, expected, token_bytes[int(owner.prompt[found.index])])
            _log.debug("%s leaves what is kept at its token %d", owner.request.request_id, found.index)

    def _fit(self, sequence: Sequence, source: Source) -> bool:
        """Evict prefixes until the sequence fits; False when it does not fit even so."""
        capabilities = self.runner.capabilities
        while len(self.running) + len(self.cache) >= capabilities.max_sequences:
            if not self.cache.evict(keep=source.match):
                break
        copied = source.length if capabilities.fork == "copy" else 0
        needed = min(sequence.length - source.length + copied + _HEADROOM_TOKENS, capabilities.cache_tokens)
        while self.runner.free_tokens() < needed:
            if not self.cache.evict(keep=source.match):
                return False
        return True

    # -- one step ----------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan one forward pass: every decode, then prefill chunks in what is left of the budget.

        While something decodes, prefill gets at most a chunk of ``prefill_chunk_tokens``, so a long prompt delays
        running streams by one chunk and no more.
        """
        decodes = [s for s in self.running if s.num_remaining == 1 and not s.is_drawn]
        prefills = [s for s in self.running if s.num_remaining > 1]
        if decodes and prefills and not self.runner.capabilities.mixed_batch:
            self._prefill_turn = not self._prefill_turn
            decodes, prefills = ([], prefills) if self._prefill_turn else (decodes, [])
        limit = self.runner.capabilities.max_batch_tokens
        decodes = decodes[:limit]
        stalls_others = any(s.num_remaining == 1 for s in self.running)
        budget = self._chunk_tokens if stalls_others else self._prefill_tokens
        chunks = self._share_budget(prefills, min(budget, limit - len(decodes)))
        plan = [(sequence, 1 + len(sequence.drafts)) for sequence in decodes] + chunks
        return Batch(
            tuple(sequence for sequence, _ in plan),
            tuple(self._span(sequence, num_tokens) for sequence, num_tokens in plan),
        )

    @staticmethod
    def _share_budget(prefills: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Shortest remaining prompt first within a priority; the oldest is sure of a quarter of the budget."""
        if not prefills or budget <= 0:
            return []
        oldest = min(prefills, key=lambda s: s.owner.order)
        assured = min(oldest.num_remaining, oldest.max_chunk, max(1, budget // 4))
        grants = {id(oldest): assured}
        left = budget - assured
        by_length = sorted(prefills, key=lambda s: (s.owner.request.priority, s.num_remaining, s.owner.arrival))
        for sequence in by_length:
            more = min(min(sequence.num_remaining, sequence.max_chunk) - grants.get(id(sequence), 0), left)
            if more:
                grants[id(sequence)] = grants.get(id(sequence), 0) + more
                left -= more
        return [(s, grants[id(s)]) for s in by_length if id(s) in grants]

    @staticmethod
    def _span(sequence: Sequence, num_tokens: int) -> Span:
        assert sequence.handle is not None
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        if sequence.drafts:
            token_ids = np.array([sequence.buffer[start], *sequence.drafts], np.int32)
            return Span(sequence.handle, start, token_ids, "all")
        if end > sequence.length:
            return Span(sequence.handle, start, LastSampled(), may_exit=True)
        outputs: Outputs = "last" if end == sequence.length else "none"
        if sequence.scores_prompt:
            outputs = "all"
        # What is computed again, and has been followed by other tokens, is computed as a prompt is.
        may_exit = num_tokens == 1 and end == sequence.length and start >= len(sequence.owner.prompt)
        return Span(sequence.handle, start, sequence.buffer[start:end], outputs, may_exit=may_exit)

    # -- leaving -----------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """After ``CacheFull``: evict a prefix, else preempt; False when neither is possible."""
        return self.cache.evict() or self.preempt()

    def preempt(self) -> bool:
        """Requeue the least urgent, youngest running sequence; its tokens are prefilled again later."""
        if len(self.running) < 2:
            return False
        victim = max(self.running, key=lambda s: (*s.owner.order, s.choice))
        self.running.remove(victim)
        assert victim.handle is not None
        self.runner.free_sequence(victim.handle)
        victim.handle, victim.num_computed = None, 0
        self.enqueue([victim])
        self.num_preemptions += 1
        return True

    def release(self, sequence: Sequence, keep: bool) -> None:
        """Take a sequence out for good; ``keep`` leaves its computed tokens to the prefix cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._count_generated(sequence)
        handle, sequence.handle = sequence.handle, None
        assert handle is not None
        sequence.num_pending = 0
        self._drop_surplus(sequence, handle)
        known = min(sequence.num_computed, sequence.length)  # the last token may be computed, and not read by anybody
        if self.is_in_doubt or known < sequence.num_computed:
            sequence.num_computed = self.runner.truncate(handle, min(known, self.runner.length(handle)))
        request = sequence.owner.request
        if keep and request.cache_prompt:
            self.cache.store(sequence.buffer[: sequence.num_computed], handle, request.namespace)
        else:
            self.runner.free_sequence(handle)

    def trim(self, sequence: Sequence) -> bool:
        """Take drafts that nobody has confirmed out of the runner; False when it gave up more than these."""
        assert sequence.handle is not None
        wanted = sequence.num_computed
        self._drop_surplus(sequence, sequence.handle)
        return sequence.num_computed == wanted

    def _drop_surplus(self, sequence: Sequence, handle: int) -> None:
        if sequence.num_surplus:
            sequence.num_surplus = 0
            sequence.num_computed = self.runner.truncate(handle, sequence.num_computed)

    def drop_drafts(self) -> bool:
        """Plan the next step without drafts; False when there are none."""
        drafted = [sequence for sequence in self.running if sequence.drafts]
        for sequence in drafted:
            sequence.drafts = ()
        return bool(drafted)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence has not ended."""
        return sequence in self.running or sequence in self.waiting

    @property
    def has_pending(self) -> bool:
        """Whether tokens of running sequences are still on the device."""
        return any(sequence.num_pending for sequence in self.running)

    def resync(self) -> None:
        """Believe the runner about what it has computed, after a forward pass that did not finish."""
        self.is_in_doubt = False
        for sequence in self.running:
            assert sequence.handle is not None
            sequence.num_surplus = 0
            sequence.num_computed = min(self.runner.length(sequence.handle), sequence.length - 1)
            if sequence.scores_prompt:  # rows that nobody received must be computed again
                sequence.num_computed = min(sequence.num_computed, sequence.num_scored)
            if self.runner.length(sequence.handle) > sequence.num_computed:
                sequence.num_computed = self.runner.truncate(sequence.handle, sequence.num_computed)

    def drop(self, request: ActiveRequest, keep: bool) -> None:
        """Take out every sequence of a request that is still in."""
        for sequence in request.sequences:
            if self.holds(sequence):
                self.release(sequence, keep)
