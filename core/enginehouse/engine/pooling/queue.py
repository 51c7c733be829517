"""Queue of pooling requests: chooses the inputs of the next pass.

Order: priority, then short requests before bulk ones, then the callers that have received least, then arrival. A pass
has inputs of short requests or of bulk ones, so that a short request waits for the end of at most one bulk pass; while
short ones keep coming, each fourth pass is one of bulk. Passes have as many tokens as are computed in about a quarter
of a second, by the time of the last ones. Does not know poolers or messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, field, frozen

from enginehouse.contract.pooler import PoolerCapabilities, PoolerInput
from enginehouse.engine.pooling.inputs import PoolInputs
from enginehouse.engine.pooling.rows import Rows
from enginehouse.engine.turns import FairShares

_MAX_SHORT_INPUTS = 8
_BULK_TURN = 4
"""A bulk request has waited for this many passes of short ones at most, less one."""

_PASS_S = 0.25
_MIN_TOKENS = 256
"""Shorter passes cost much more per token, above all beside other programs, for which each layer has to wait."""

_SMALL_TOKENS = 32
_FIXED_WEIGHT = 0.25
_MAX_CHANGE = 2.0
"""From one pass to the next, so that one disturbed pass does not change much."""


@define(eq=False)
class PoolJob:
    """One request in the queue.

    Attributes:
        call: number of the call.
        arrival: its number in order of arrival.
        rows: of the different inputs, ``(num_inputs, dimensions)``.
        missing: indices of inputs that are not computed yet, longest first; ``lengths`` are their tokens, negated, so
            that they ascend.
        is_begun: some of it has been in a pass; ``is_computing``: in the last one.
    """

    call: int
    made: PoolInputs
    arrival: int
    rows: Rows
    missing: list[int]
    lengths: list[int]
    is_begun: bool = False
    is_computing: bool = False

    @property
    def is_bulk(self) -> bool:
        """True if it has many different texts."""
        return len(self.made.inputs) > _MAX_SHORT_INPUTS

    def forget(self, computed: frozenset[int]) -> None:
        """Remove inputs from the missing ones."""
        kept: list[int] = []
        place, num_left = 0, len(computed)
        while num_left:  # most are at the front, so the rest need not be looked at
            if self.missing[place] in computed:
                num_left -= 1
            else:
                kept.append(place)
            place += 1
        self.missing[:place] = [self.missing[one] for one in kept]
        self.lengths[:place] = [self.lengths[one] for one in kept]

    def is_overdue(self, now_s: float) -> bool:
        """Return True if it has waited for its first pass longer than it may."""
        limit_s = self.made.request.queue_timeout_s
        return not self.is_begun and limit_s is not None and now_s - self.made.accepted_s > limit_s


@frozen(eq=False)
class Pass:
    """Inputs to compute together, longest first: ``inputs[i]`` is number ``indices[i]`` of ``jobs[i]``."""

    jobs: Sequence[PoolJob]
    indices: Sequence[int]
    inputs: Sequence[PoolerInput] = field(init=False)
    num_tokens: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        inputs = [job.made.inputs[index] for job, index in zip(self.jobs, self.indices, strict=True)]
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "num_tokens", sum(len(one.token_ids) for one in inputs))

    def by_job(self) -> Iterator[tuple[PoolJob, list[int]]]:
        """Yield each job once, with the positions of its inputs in the pass."""
        positions: dict[PoolJob, list[int]] = {}
        for position, job in enumerate(self.jobs):
            positions.setdefault(job, []).append(position)
        yield from positions.items()

    def part(self, positions: Sequence[int]) -> Pass:
        """Return a pass with some of the inputs."""
        return Pass([self.jobs[one] for one in positions], [self.indices[one] for one in positions])


class PassLength:
    """Tokens of a usual pass: what the model computes in a quarter of a second, at most what the pooler states.

    Follows the measured times, since they depend on the model and on what else runs on the machine. The time of small
    passes, of short requests, is taken as fixed: a shorter pass would not save it.

    Attributes:
        num_tokens: most tokens of the next pass, except for an input that is longer by itself.
    """

    def __init__(self, capabilities: PoolerCapabilities) -> None:
        self._most = capabilities.pass_tokens or capabilities.max_batch_tokens
        self._least = self.num_tokens = min(_MIN_TOKENS, self._most)
        self._fixed_s = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """Adapt to the time of a pass; only one of at least half the tokens tells something about longer ones."""
        if num_tokens <= _SMALL_TOKENS:
            self._fixed_s += _FIXED_WEIGHT * (seconds - self._fixed_s)
        elif 2 * num_tokens >= self.num_tokens:
            fitting = num_tokens * _PASS_S / max(seconds - self._fixed_s, 1e-9)
            changed = max(self.num_tokens / _MAX_CHANGE, min(fitting, self.num_tokens * _MAX_CHANGE))
            self.num_tokens = max(self._least, min(int(changed), self._most))


class PoolQueue:
    """Requests whose rows are not complete. Used on the engine thread.

    Attributes:
        length: tokens of a usual pass; told the time of each pass.
    """

    def __init__(self, capabilities: PoolerCapabilities) -> None:
        self.length = PassLength(capabilities)
        self._max_texts = capabilities.max_batch_texts
        self._jobs: dict[int, PoolJob] = {}
        self._shares = FairShares()
        self._num_arrivals = 0
        self._num_short_passes = 0  # since the last bulk pass, while bulk requests wait

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, call: int) -> bool:
        return call in self._jobs

    def __iter__(self) -> Iterator[PoolJob]:
        return iter(tuple(self._jobs.values()))

    @property
    def num_begun(self) -> int:
        """Number of requests of which something is computed."""
        return sum(job.is_begun for job in self._jobs.values())

    def add(self, call: int, made: PoolInputs, rows: Rows, missing: Sequence[int]) -> PoolJob:
        """Add a request whose inputs ``missing`` are to be computed."""
        longest_first = sorted(missing, key=lambda index: -len(made.inputs[index].token_ids))
        lengths = [-len(made.inputs[index].token_ids) for index in longest_first]
        job = PoolJob(call, made, self._num_arrivals, rows, longest_first, lengths)
        self._num_arrivals += 1
        self._shares.arrive(made.request.caller, {other.made.request.caller for other in self._jobs.values()})
        self._jobs[call] = job
        return job

    def remove(self, call: int) -> PoolJob | None:
        """Remove a request; returns None if it is not in the queue."""
        return self._jobs.pop(call, None)

    def next_pass(self) -> Pass | None:
        """Return the inputs to compute now; None if there are none."""
        if not self._jobs:
            return None
        urgent = min(job.made.request.priority for job in self._jobs.values())
        waiting = [job for job in self._jobs.values() if job.made.request.priority == urgent]
        bulk, short = [job for job in waiting if job.is_bulk], [job for job in waiting if not job.is_bulk]
        if not bulk or not short:
            chosen, self._num_short_passes = bulk or short, 0
        elif self._num_short_passes < _BULK_TURN - 1:
            chosen, self._num_short_passes = short, self._num_short_passes + 1
        else:
            chosen, self._num_short_passes = bulk, 0
        return self._fill(sorted(chosen, key=self._place))

    def _place(self, job: PoolJob) -> tuple[float, int]:
        return self._shares.of(job.made.request.caller), job.arrival

    def _fill(self, jobs: Sequence[PoolJob]) -> Pass:
        """Return a pass of as many inputs as fit, of one request after the other; at least one."""
        chosen: list[tuple[int, PoolJob, int]] = []
        room = self.length.num_tokens
        for job in jobs:
            place = 0
            while room > 0 and len(chosen) < self._max_texts:
                if chosen:  # the longest one that fits
                    place = bisect_left(job.lengths, -room, place)
                if place == len(job.missing):
                    break
                chosen.append((-job.lengths[place], job, job.missing[place]))
                room += job.lengths[place]
                place += 1
        chosen.sort(key=lambda one: -one[0])
        return Pass([job for _, job, _ in chosen], [index for _, _, index in chosen])

    def computed(self, done: Pass, rows: Rows) -> list[PoolJob]:
        """Store the rows of a pass, and charge its callers; returns the requests that are complete, removed.

        Args:
            rows: ``(num_inputs, dimensions)``, in the order of the pass.
        """
        complete = []
        for job, positions in done.by_job():
            indices = [done.indices[position] for position in positions]
            job.rows[indices] = rows[positions]
            job.forget(frozenset(indices))
            self._shares.start(job.made.request.caller, sum(len(done.inputs[one].token_ids) for one in positions))
            if not job.missing and self._jobs.pop(job.call, None) is not None:
                complete.append(job)
        return complete


def empty_rows(made: PoolInputs, dimensions: int) -> Rows:
    """Return memory for the rows of a request's different inputs."""
    return np.zeros((len(made.inputs), dimensions), np.float32)
