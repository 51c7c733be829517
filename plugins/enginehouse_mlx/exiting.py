"""A runner with early exit under a policy; without a policy it behaves like its base class.

Before a policy is used, the model is tested: of two sequences one exits, and each must get the result it gets alone.
This refuses any model whose layer loop is not what the switches expect, independent of its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from enginehouse.contract.backend import RunnerCapabilities, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.exit_policy import BoundExitPolicy, ExitView
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.depth import LayeredModel
from enginehouse_mlx.exits import EarlyExits, Exited
from enginehouse_mlx.halves import PROBE, agrees, batch_tolerance
from enginehouse_mlx.runner import LogitsRows, MlxRunner, num_rows

__all__ = ["ExitRows", "ExitingRunner"]


class ExitRows(LogitsRows):
    """Rows of logits, and the number of layers that the token of each ran through."""

    def __init__(self, logits: mx.array, exit_layers: Sequence[int]) -> None:
        super().__init__(logits)
        self.exit_layers = exit_layers


class ExitingRunner(MlxRunner):
    """Implements :class:`enginehouse.contract.exit_policy.LayerAccess`."""

    def __init__(
        self,
        model: LayeredModel,
        memory: SlotMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
        *,
        max_checkpoints: int,
    ) -> None:
        super().__init__(model, memory, capabilities, text, info, max_checkpoints=max_checkpoints)
        self.num_layers = len(model.layers)
        self._exits: EarlyExits | None = None

    @cached_property
    def _can_be_left(self) -> bool:
        """True if the test succeeded. Cached: calibration uses many policies, one test is enough."""
        return bool(self.capabilities.exit_layers) and _can_leave(self.model)

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """See :class:`enginehouse.contract.exit_policy.LayerAccess`."""
        if policy is None:
            self._exits = None
            return
        if self._memory.states:
            raise ModelLoadError("layers of this model keep states of sequences, so all tokens must run through them")
        if not self._can_be_left:
            raise ModelLoadError("this model's layers are built in a way that tokens cannot leave between them")
        self._exits = EarlyExits(self.model, self._memory, policy)

    def close(self) -> None:
        """Release weights and KV memory. Idempotent."""
        self._exits = None
        super().close()

    def _rows(self, spans: Sequence[Span]) -> LogitsRows:
        """Rows of checked spans, not yet evaluated; with a policy, including the number of layers of each."""
        if self._exits is None:
            return super()._rows(spans)
        early = [i for i, span in enumerate(spans) if _may_leave(span)]
        others = [i for i, span in enumerate(spans) if not _may_leave(span)]
        parts: list[mx.array] = []
        found: list[tuple[int, int]] = []
        """For each row of ``parts``, its span and the number of layers it ran through."""
        if others:
            parts.append(self._logits([spans[i] for i in others]))
            for i in others:
                found += [(i, spans[i].num_layers or self.num_layers)] * num_rows(spans[i])
        for group in [early] if early and self.model.halves.can_batch else [[i] for i in early]:
            exited = self._leave(self._exits, [spans[i] for i in group])
            parts.append(exited.logits)
            found += zip(group, exited.layers, strict=True)
        order = sorted(range(len(found)), key=lambda place: found[place][0])
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)[mx.array(order)]
        return ExitRows(logits, [found[place][1] for place in order])

    def _leave(self, exits: EarlyExits, spans: Sequence[Span]) -> Exited:
        batch = Batch(tuple(span.sequence for span in spans), tuple(span.start for span in spans), 1)
        token_ids = np.concatenate([span.input for span in spans]).astype(np.int32)
        return exits.run(batch, mx.array(token_ids[:, None]))


class _FirstLeaves:
    """Policy of the test: the first of the sequences exits after the first layer."""

    layers = (1,)

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = slots

    def leaves(self, view: ExitView) -> list[bool]:
        view.logits()
        return [slot == 0 for slot in self._slots]


def _may_leave(span: Span) -> bool:
    """True if the span is a token of an answer of the base model whose row of logits is requested."""
    is_token = span.num_tokens == 1 and span.outputs != "none"
    return span.may_exit and is_token and span.num_layers is None and not span.adapter


def _can_leave(model: LayeredModel) -> bool:
    """True if one sequence gets the logits of one layer while the other, in the same batch, gets those of all."""
    halves = model.halves
    wanted = []
    for num_layers, size in ((1, 3), (None, 4)):
        caches = model.make_memory().begin(Batch((0,), (0,), size))
        wanted.append(halves.head(model.body(num_layers)(mx.array([PROBE[:size]]), caches)[0, -1:]))

    def compute() -> mx.array:
        memory = model.make_memory()
        for slot, size in ((0, 2), (1, 3)):
            halves.body(mx.array([PROBE[:size]]), memory.begin(Batch((slot,), (0,), size)))
        found = []
        for slots in [(0, 1)] if halves.can_batch else [(0,), (1,)]:
            batch = Batch(slots, tuple(slot + 2 for slot in slots), 1)
            token_ids = mx.array([[PROBE[slot + 2]] for slot in slots])
            found.append(EarlyExits(model, memory, _FirstLeaves(slots)).run(batch, token_ids).logits)
        return mx.concatenate(found)

    return agrees(mx.concatenate(wanted), compute, batch_tolerance(wanted[0].dtype))
