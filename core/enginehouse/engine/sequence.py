"""The state of requests and sequences inside the engine.

A sequence *is* its token ids: everything else (KV positions, batch neighbours) can be rebuilt from them,
which is why preemption and restart only reset ``handle`` and ``num_computed``. The scheduler owns
``handle`` and ``num_computed``; the loop owns the rest. Nothing here calls a runner.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.engine.constraints import ConstraintState
from enginehouse.engine.sampling import SequenceSampler
from enginehouse.output.text_stream import TextStream
from enginehouse.types import EngineRequest, TokenLogprob

__all__ = ["ActiveRequest", "Sequence"]


@define(eq=False)
class ActiveRequest:
    """A request that the engine holds, from ``add`` to its last event. Times are ``time.monotonic`` seconds."""

    request: EngineRequest
    prompt: NDArray[np.int32]  # (num_prompt_tokens,)
    arrival: int
    received_s: float
    sequences: list[Sequence] = field(factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int | None = None
    num_completion_tokens: int = 0
    num_forced_tokens: int = 0
    started_s: float | None = None
    first_token_s: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: served first comes first."""
        return (self.request.priority, self.arrival)


@define(eq=False)
class Sequence:
    """The token stream of one choice.

    Invariants: ``0 <= num_computed < length <= max_length`` while running; ``handle`` is None exactly while
    waiting, and then ``num_computed == 0``.
    """

    owner: ActiveRequest
    choice: int
    buffer: NDArray[np.int32]  # (max_length,); the first ``length`` hold prompt and answer
    length: int
    sampler: SequenceSampler
    text: TextStream
    constraint: ConstraintState | None = None
    handle: int | None = None
    num_computed: int = 0
    pending_logprobs: deque[TokenLogprob] = field(factory=deque)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(length,) int32 view of prompt and answer so far."""
        return self.buffer[: self.length]

    @property
    def max_length(self) -> int:
        """Tokens at which the sequence ends with finish reason ``length``."""
        return len(self.buffer)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return self.length - len(self.owner.prompt)

    @property
    def num_remaining(self) -> int:
        """Tokens that the runner has not seen: 1 while decoding, more while prefilling."""
        return self.length - self.num_computed

    @property
    def leader(self) -> Sequence:
        """The choice whose prefill the others share."""
        return self.owner.sequences[0]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.buffer[self.length] = token_id
        self.length += 1
