"""Snapshots and statistics of a running engine. Called between steps; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from enginehouse.contract.inspection import (
    BATCH_SIZES,
    EngineMetrics,
    EngineView,
    Phase,
    RequestView,
    SequenceView,
    batch_size_bucket,
)
from enginehouse.contract.types import EngineStats
from enginehouse.engine.scheduler import Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence

__all__ = ["StepCounts", "phase_of", "view_engine"]


class StepCounts:
    """Number of steps by batch size."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_batched = 0
        self._by_size = [0] * (len(BATCH_SIZES) + 1)

    def add(self, num_sequences: int) -> None:
        """Count one step."""
        self.num_steps += 1
        self._num_batched += num_sequences
        self._by_size[batch_size_bucket(num_sequences)] += 1

    def figures(self, stats: EngineStats, num_cache_tokens: int) -> EngineMetrics:
        """Return the statistics, combined with ``stats``."""
        return EngineMetrics(stats, num_cache_tokens, tuple(self._by_size), self._num_batched)


def view_engine(scheduler: Scheduler, requests: Iterable[ActiveRequest], now_s: float) -> EngineView:
    """Return a snapshot of running and waiting requests and of the prefix cache."""
    runner = scheduler.runner
    return EngineView(
        num_slots=scheduler.slots,
        num_cache_tokens=runner.capabilities.cache_tokens,
        num_free_tokens=runner.free_tokens(),
        requests=tuple(_view_request(request, scheduler, now_s) for request in requests),
        prefixes=tuple(scheduler.cache.entries()),
    )


def _view_request(owner: ActiveRequest, scheduler: Scheduler, now_s: float) -> RequestView:
    return RequestView(
        request_id=owner.request.request_id,
        age_s=now_s - owner.received_s,
        usage=replace(owner.usage.snapshot(), completion_tokens=sum(one.num_generated for one in owner.sequences)),
        sequences=tuple(
            SequenceView(
                choice=sequence.choice,
                phase=phase_of(sequence),
                num_kv_tokens=sequence.num_computed,
                num_completion_tokens=sequence.num_generated,
                is_thinking=sequence.reasoning is not None and sequence.reasoning.is_inside,
            )
            for sequence in owner.sequences
            if scheduler.holds(sequence)
        ),
    )


def phase_of(sequence: Sequence) -> Phase:
    """Return the phase of a sequence that has not ended."""
    if sequence.handle is None:
        return "paused" if sequence.num_generated else "queued"
    is_prefilled = sequence.num_computed >= len(sequence.owner.prompt)
    return "decode" if is_prefilled and sequence.num_generated else "prefill"
