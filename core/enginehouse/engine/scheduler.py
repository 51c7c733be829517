"""Scheduler: selects the sequences of the next step, and their tokens.

Called by the loop. Does not know tensors or text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import numpy as np
from attrs import frozen

from enginehouse.contract.backend import LastSampled, Outputs, Runner, Span
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.errors import AdapterRefused, EnginehouseError, PluginFailed
from enginehouse.contract.media import MediaInput
from enginehouse.contract.types import CacheMiss, EngineSettings
from enginehouse.engine.adapters import LoadedAdapters
from enginehouse.engine.checkpoints import next_place
from enginehouse.engine.disk import DiskTier, Recall
from enginehouse.engine.media import Embeddings
from enginehouse.engine.prefix_cache import PrefixCache, Truncation, free
from enginehouse.engine.reuse import PrefixReuse, Source
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.engine.turns import AdapterTurns, FairShares

_log = logging.getLogger(__name__)

_IMAGE = b"[image]"
_HEADROOM_TOKENS = 64
"""A sequence is admitted if its tokens and this many more fit, so that it is not preempted at once."""


@frozen(eq=False)
class Batch:
    """One forward pass: ``spans[i]`` belongs to ``sequences[i]``; or the encoding of the next chunk of ``encodes``."""

    sequences: tuple[Sequence, ...] = ()
    spans: tuple[Span, ...] = ()
    encodes: Sequence | None = None


class Scheduler:
    """Owns the waiting and running sequences and their runner handles.

    Attributes:
        is_in_doubt: True after a failed pass, until ``resync`` reads from the runner what was computed.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, disk: DiskTier | None = None) -> None:
        self.runner = runner
        self.settings = settings
        self.adapters = LoadedAdapters(runner, settings.max_adapters)
        self.embeddings = Embeddings(settings.embedding_cache_bytes)
        self._chunk_turn = False
        self._takes_turns = runner.capabilities.adapters == "per_pass"
        self._turns = AdapterTurns()
        self.cache = PrefixCache(runner, settings.prefix_cache, disk.save if disk is not None else None)
        self._recall = Recall(disk, self.cache) if disk is not None else None
        self._reuse = PrefixReuse(runner, self.cache, settings.prefix_cache)
        self._keeper = Truncation(runner).keeper
        self._shares = FairShares()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.is_in_doubt = False
        self._refused: list[tuple[ActiveRequest, EnginehouseError]] = []
        self.slots = min(settings.slots, runner.capabilities.max_sequences)
        usual = runner.capabilities.prefill_chunk_tokens
        self._chunk_tokens = settings.prefill_chunk_tokens or usual
        self._prefill_tokens = settings.max_prefill_tokens or max(2 * usual, self._chunk_tokens)
        self._prefill_turn = True

    @property
    def num_waiting_requests(self) -> int:
        """Number of requests of which no sequence has started yet."""
        return sum(1 for sequence in self.waiting if sequence is sequence.leader and sequence.owner.started_s is None)

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Queue sequences by priority, then those with generated tokens, then callers' service, then arrival."""
        for sequence in sequences:
            self._shares.arrive(sequence.owner.request.caller, self._waiting_callers())
            self.waiting.append(sequence)
        self.waiting.sort(key=self._place)

    def overdue(self, now: float) -> list[ActiveRequest]:
        """Return the requests that have waited for their start longer than their queue timeout."""
        return [
            sequence.owner
            for sequence in self.waiting
            if sequence is sequence.leader and sequence.owner.is_overdue(now)
        ]

    def _place(self, sequence: Sequence) -> tuple[float, ...]:
        """Return the sort key of a waiting sequence."""
        owner = sequence.owner
        given = self._shares.of(owner.request.caller)
        return (owner.request.priority, sequence.num_generated == 0, given, owner.arrival, sequence.choice)

    def _waiting_callers(self) -> set[str]:
        return {sequence.owner.request.caller for sequence in self.waiting}

    # -- admission ---------------------------------------------------------------------------------

    def admit(self, on_start: Callable[[ActiveRequest], None]) -> list[Sequence]:
        """Start waiting sequences while slots and KV positions are free; return those started.

        Args:
            on_start: called before the runner opens the first sequence of a request.
        """
        started: list[Sequence] = []
        while len(self.running) < self.slots and self.waiting:
            several = len(self._waiting_callers()) > 1
            if several:
                self._put_in_line()
            if not self._start_next(started, on_start, only_one=several):
                break
        return started

    def take_refused(self) -> list[tuple[ActiveRequest, EnginehouseError]]:
        """Return the requests whose sequence or adapter the runner failed to open since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _put_in_line(self) -> None:
        """Sort the waiting sequences by the current service of their callers."""
        for sequence in self.running:
            self._count_generated(sequence)
        self.waiting.sort(key=self._place)

    def _start_next(
        self, started: list[Sequence], on_start: Callable[[ActiveRequest], None], *, only_one: bool
    ) -> bool:
        """Start queued sequences, or one with ``only_one`` (the queue is then sorted again); True if more may start."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.slots:
                return False
            if self._reuse.should_wait(sequence, self.waiting, self.running):
                continue
            try:
                if self._recall is not None and self._waits_for_disk(sequence, self._recall):
                    continue
                if not self._start(sequence, on_start):
                    return False
            except (AdapterRefused, PluginFailed) as error:
                self._give_back(sequence)
                self._refused.append((sequence.owner, error))
                continue
            self.waiting.remove(sequence)
            self.running.append(sequence)
            started.append(sequence)
            self._shares.start(sequence.owner.request.caller, sequence.length - sequence.num_computed)
            if only_one:
                return True
        return False

    def _count_generated(self, sequence: Sequence) -> None:
        """Charge the caller for the tokens generated since the last call."""
        more = sequence.num_generated - sequence.num_counted
        sequence.num_counted = sequence.num_generated
        if more:
            self._shares.generated(sequence.owner.request.caller, more)

    def _waits_for_disk(self, sequence: Sequence, recall: Recall) -> bool:
        """Return True while a prefix of the sequence is being read; blocks if no other sequence is running."""
        request = sequence.owner.request
        if not sequence.has_asked_disk:
            sequence.has_asked_disk = True
            if request.cache_prompt and not sequence.scores_prompt:
                num_held = self._reuse.find(sequence, self.running).length
                namespace = sequence.owner.cache_namespace
                sequence.disk_read = recall.begin(sequence.reusable_token_ids, namespace, num_held)
        read = sequence.disk_read
        if read is None:
            return False
        return not recall.is_over(read, sequence.owner.cache_namespace, len(self.running), waits=not self.running)

    def _start(self, sequence: Sequence, on_start: Callable[[ActiveRequest], None]) -> bool:
        """Open a runner handle for the sequence that reuses as many computed tokens as possible."""
        source = self._reuse.find(sequence, self.running)
        self._explain(sequence.owner)
        if not self._fit(sequence, source):
            if self.running:
                return False
            self.cache.clear()  # a single sequence fits into an empty cache
            source = Source()
        owner, usage = sequence.owner, sequence.owner.usage
        taken = self.adapters.take(owner.request.adapters)
        if taken is None:
            return False  # running sequences use them all
        sequence.adapters = taken
        if not owner.has_source:
            on_start(owner)
        sequence.handle, sequence.num_computed = self._reuse.open(source)
        if (chunk := sequence.next_chunk) is not None and chunk.start < sequence.num_computed:
            sequence.num_computed = self.runner.truncate(sequence.handle, 0)  # the runner has divided a chunk
        if not owner.has_source:
            owner.has_source = True
            usage.cached_tokens = min(sequence.num_computed, len(owner.prompt) - 1)
            if sequence.disk_read is not None:
                usage.loaded_prompt_tokens = max(usage.cached_tokens - sequence.disk_read.num_held, 0)
        sequence.disk_read = None
        if self._keeper is not None:
            self._keep_checkpoint(self._keeper, sequence)
        return True

    def _explain(self, owner: ActiveRequest) -> None:
        """Record once where the prompt diverges from the cached sequences."""
        if owner.has_source or not owner.request.cache_prompt:
            return
        found = self.cache.divergence(owner.prompt[: owner.num_shareable], owner.cache_namespace)
        if found is not None:
            expected = None if found.expected is None else self._shown(found.expected)
            owner.cache_miss = CacheMiss(found.index, expected, self._shown(int(owner.prompt[found.index])))
            _log.debug("%s differs from the cached prefixes at token %d", owner.request.request_id, found.index)

    def _shown(self, token_id: int) -> bytes:
        return _IMAGE if token_id < 0 else self.runner.tokenizer.token_bytes[token_id]

    def _fit(self, sequence: Sequence, source: Source) -> bool:
        """Evict prefixes until the sequence fits; returns False if it does not fit even then."""
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
        """Plan one forward pass: every decode, then prefill chunks within the rest of the budget.

        While a sequence decodes, prefill gets at most a chunk of ``prefill_chunk_tokens``, so a long prompt delays
        running streams by at most one chunk.
        """
        if self._keeper is not None:
            for sequence in self.running:
                if sequence.num_computed >= sequence.next_checkpoint and not sequence.num_surplus:
                    self._keep_checkpoint(self._keeper, sequence)
        if (chunk := self._schedule_chunk()) is not None:
            return chunk
        running = self._next_group() if self._takes_turns else self.running
        decodes = [s for s in running if s.num_remaining == 1 and not s.is_drawn]
        prefills = [s for s in running if s.num_remaining > 1 and not s.is_at_chunk]
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

    def _keep_checkpoint(self, keeper: CheckpointKeeper, sequence: Sequence) -> None:
        """Keep the state of a sequence that has reached a place, or that starts from a cached prefix."""
        assert sequence.handle is not None
        if sequence.num_computed:
            with contextlib.suppress(EnginehouseError):  # what it would save is computed again
                keeper.keep_checkpoint(sequence.handle)
        sequence.next_checkpoint = self._next_place(sequence)

    def _repeat_checkpoints(self, sequence: Sequence) -> None:
        """Keep checkpoints again at the places before which a sequence has gone back."""
        if self._keeper is not None:
            sequence.next_checkpoint = min(sequence.next_checkpoint, self._next_place(sequence))

    @staticmethod
    def _next_place(sequence: Sequence) -> int:
        owner = sequence.owner
        return next_place(owner.places, sequence.num_computed, len(owner.prompt))

    def _schedule_chunk(self) -> Batch | None:
        """Plan a step for one chunk of an image: to encode it, then to compute it in a pass of its own.

        While others have work, every second step is theirs, so that no stream waits longer than one such step.
        """
        at_chunk = [s for s in self.running if s.is_at_chunk]
        self._chunk_turn = bool(at_chunk) and not (self._chunk_turn and any(s.has_work for s in self.running))
        if not self._chunk_turn:
            return None
        sequence = min(at_chunk, key=lambda s: s.owner.order)
        placed = sequence.next_chunk
        assert placed is not None and sequence.handle is not None
        if sequence.embedding is None:
            sequence.embedding = self.embeddings.get(sequence.owner.request.namespace, placed.chunk.key)
        if sequence.embedding is None:
            return Batch(encodes=sequence)
        media = MediaInput(placed.chunk, sequence.embedding, placed.token_ids)
        return Batch((sequence,), (Span(sequence.handle, placed.start, media, "none", adapter=sequence.adapter),))

    def _next_group(self) -> list[Sequence]:
        """Return the sequences of the set of adapters whose turn it is."""
        ready = [s for s in self.running if s.has_work]
        turn = self._turns.next(dict.fromkeys(s.adapter for s in ready))
        return [s for s in ready if s.adapter == turn]

    def _give_back(self, sequence: Sequence) -> None:
        """End the use of a sequence's adapters."""
        if sequence.adapters:
            sequence.adapters = ()
            self.adapters.give_back(sequence.owner.request.adapters)

    @staticmethod
    def _share_budget(prefills: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Share by priority, then shortest remaining prompt; the oldest is guaranteed a quarter of the budget."""
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
            return Span(sequence.handle, start, token_ids, "all", adapter=sequence.adapter)
        if end > sequence.length:
            return Span(sequence.handle, start, LastSampled(), may_exit=True, adapter=sequence.adapter)
        outputs: Outputs = "last" if end == sequence.length else "none"
        if sequence.scores_prompt:
            outputs = "all"
        # A token that is recomputed and already followed by others is computed like a prompt token.
        may_exit = num_tokens == 1 and end == sequence.length and start >= len(sequence.owner.prompt)
        token_ids = sequence.buffer[start:end]
        return Span(sequence.handle, start, token_ids, outputs, may_exit=may_exit, adapter=sequence.adapter)

    def postpone(self, *, is_in_doubt: bool) -> None:
        """Plan a failed pass once more in the next step, when the tokens still on the device are known.

        If it took turns with the passes of other sequences, it has the turn again: they would leave new tokens there.
        """
        self.is_in_doubt = is_in_doubt
        self._chunk_turn, self._prefill_turn = False, not self._prefill_turn

    # -- leaving -----------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """After ``CacheFull``: evict a prefix, else preempt; returns False if neither is possible."""
        return self.cache.evict() or self.preempt()

    def preempt(self) -> bool:
        """Requeue the least urgent, youngest running sequence; its tokens are prefilled again later."""
        if len(self.running) < 2:
            return False
        self._requeue(max(self.running, key=lambda s: (*s.owner.order, s.choice)))
        self.num_preemptions += 1
        return True

    def _requeue(self, sequence: Sequence) -> None:
        """Take a running sequence off the runner; its tokens are computed again when it is started again."""
        self.running.remove(sequence)
        assert sequence.handle is not None
        free(self.runner, sequence.handle)
        self._give_back(sequence)
        sequence.handle, sequence.num_computed, sequence.embedding = None, 0, None
        self.enqueue([sequence])

    def release(self, sequence: Sequence, keep: bool) -> None:
        """Remove a sequence permanently; ``keep`` stores its computed tokens in the prefix cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._count_generated(sequence)
        handle, sequence.handle = sequence.handle, None
        assert handle is not None
        self._give_back(sequence)
        sequence.num_pending = 0
        try:
            self._drop_surplus(sequence, handle)
            # The last token may be computed but not read.
            known = min(sequence.num_computed, sequence.length, sequence.owner.num_shareable)
            if self.is_in_doubt or known < sequence.num_computed:
                sequence.num_computed = self.runner.truncate(handle, min(known, self.runner.length(handle)))
        except PluginFailed:
            keep = False  # it is not known what the handle holds
        owner, request = sequence.owner, sequence.owner.request
        if keep and request.cache_prompt:
            if self.cache.is_enabled:
                num_kept = min(sequence.num_computed, len(owner.prompt)) - owner.usage.cached_tokens
                owner.usage.kept_tokens = max(owner.usage.kept_tokens, num_kept)
            self.cache.store(sequence.buffer[: sequence.num_computed], handle, owner.cache_namespace)
        else:
            free(self.runner, handle)

    def trim(self, sequence: Sequence) -> bool:
        """Remove unverified drafts from the runner; returns False if the runner dropped more than these."""
        assert sequence.handle is not None
        wanted = sequence.num_computed
        self._drop_surplus(sequence, sequence.handle)
        return sequence.num_computed == wanted

    def rewind(self, sequence: Sequence) -> None:
        """Remove tokens from the runner that a sequence has taken back, and its last one: its logits are needed again.

        The runner may drop more; this is computed again.
        """
        sequence.num_surplus = 0
        sequence.num_computed = min(sequence.num_computed, sequence.length - 1)
        if sequence.handle is not None:
            sequence.num_computed = self.runner.truncate(sequence.handle, sequence.num_computed)
            self._repeat_checkpoints(sequence)

    def _drop_surplus(self, sequence: Sequence, handle: int) -> None:
        if sequence.num_surplus:
            sequence.num_surplus = 0
            sequence.num_computed = self.runner.truncate(handle, sequence.num_computed)

    def drop_drafts(self) -> bool:
        """Plan the next step without drafts; returns False if there are none."""
        drafted = [sequence for sequence in self.running if sequence.drafts]
        for sequence in drafted:
            sequence.drafts = ()
        return bool(drafted)

    def holds(self, sequence: Sequence) -> bool:
        """Return True if the sequence has not ended."""
        return sequence in self.running or sequence in self.waiting

    @property
    def has_pending(self) -> bool:
        """True if tokens of running sequences are still on the device."""
        return any(sequence.num_pending for sequence in self.running)

    def resync(self) -> None:
        """Resynchronise sequence lengths with the runner after a failed forward pass."""
        self.is_in_doubt = False
        for sequence in list(self.running):
            sequence.num_surplus = 0
            try:
                self._resync(sequence)
            except PluginFailed:
                self._requeue(sequence)

    def _resync(self, sequence: Sequence) -> None:
        assert sequence.handle is not None
        num_held = self.runner.length(sequence.handle)
        sequence.num_computed = min(num_held, sequence.length - 1)
        if sequence.scores_prompt:  # rows that were never received must be recomputed
            sequence.num_computed = min(sequence.num_computed, sequence.num_scored)
        if num_held > sequence.num_computed:
            sequence.num_computed = self.runner.truncate(sequence.handle, sequence.num_computed)
        self._repeat_checkpoints(sequence)

    def drop(self, request: ActiveRequest, keep: bool) -> None:
        """Remove every sequence of a request that has not ended."""
        for sequence in request.sequences:
            if self.holds(sequence):
                self.release(sequence, keep)
