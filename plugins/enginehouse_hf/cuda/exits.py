"""Early exit on one CUDA device: decode steps part by part, with a policy deciding between parts which tokens exit.

Each part is a graph (see ``parts.py``), so the overhead of a step is that of the policy: its arithmetic, and one
transfer of its decision to the host per evaluation. Exited tokens get keys and values in all remaining layers at once,
from their state at the exit; the others continue in a smaller batch.

Source: as in ``enginehouse_hf.exits``, state propagation of CALM (Schuster et al., 2022, arXiv:2207.07061).
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_hf.cuda.packing import PackedSpans
from enginehouse_hf.cuda.parts import NetworkParts, TokenBatch

__all__ = ["CudaExits", "Exited"]

_Columns = NDArray[np.intp]


@define(eq=False)
class Exited:
    """Result of a pass.

    Attributes:
        layers: (num_tokens,) number of layers that each token ran through.
        logits: (num_tokens, vocab_size), available after the pass and valid until the next one.
    """

    layers: NDArray[np.intp]
    logits: Tensor | None = None

    def add(self, columns: _Columns, logits: Tensor) -> None:
        """Add the logits of some tokens, (num_columns, vocab_size)."""
        if len(columns) == len(self.layers):
            self.logits = logits
            return
        if self.logits is None:
            self.logits = logits.new_empty(len(self.layers), logits.shape[1])
        self.logits[_index(columns, logits)] = logits


@frozen(eq=False)
class _View:
    """Implements :class:`enginehouse.contract.exit_policy.ExitView`; keeps the logits that the policy requested."""

    layer: int
    _parts: NetworkParts
    _batch: TokenBatch
    computed: list[Tensor] = field(factory=list)

    @property
    def hidden(self) -> Tensor:
        """(num_rows, hidden_size) float32."""
        return self._batch.hidden.float()

    @property
    def previous_hidden(self) -> Tensor:
        """(num_rows, hidden_size) float32."""
        return self._batch.before.float()

    def logits(self) -> Tensor:
        """(num_rows, vocab_size) float32."""
        if not self.computed:
            self.computed.append(self._parts.logits(self._batch))
        return self.computed[0].float()


class CudaExits:
    """Decode steps with early exit.

    Args:
        parts: the parts of the model, recorded for the layers of the policy.
        policy: decides the exits.
    """

    def __init__(self, parts: NetworkParts, policy: BoundExitPolicy) -> None:
        self._parts, self._policy = parts, policy

    def run(self, packed: PackedSpans) -> Exited:
        """Run one pass over plain decodes, in their order; waits for the device at every policy evaluation."""
        num_tokens, num_layers = packed.num_decodes, self._parts.num_layers
        exited = Exited(np.full(num_tokens, num_layers))
        inside: _Columns = np.arange(num_tokens)
        batch, begin = self._parts.load(packed), 0
        for layer in self._policy.layers:
            self._parts.run_layers(batch, begin, layer)
            begin = layer
            view = _View(layer, self._parts, batch)
            leaves = np.asarray(self._policy.leaves(view))
            if not leaves.any():
                continue
            exited.layers[inside[leaves]] = layer
            inside, batch = self._part_ways(packed, inside, leaves, view, batch, exited)
            if not len(inside):
                return exited
        self._parts.run_layers(batch, begin, num_layers)
        exited.add(inside, self._parts.logits(batch))
        return exited

    def _part_ways(
        self,
        packed: PackedSpans,
        inside: _Columns,
        leaves: NDArray[np.bool_],
        view: _View,
        batch: TokenBatch,
        exited: Exited,
    ) -> tuple[_Columns, TokenBatch]:
        """Compute logits and remaining keys of exiting tokens; return the remaining columns and their batch."""
        leaving, staying = inside[leaves], inside[~leaves]
        known = view.computed[0] if view.computed else None
        if not len(staying):
            exited.add(leaving, known if known is not None else self._parts.logits(batch))
            self._parts.write_keys(batch, view.layer)
            return staying, batch
        hidden = batch.hidden
        at_leaving, at_staying = (_index(np.flatnonzero(mask), hidden) for mask in (leaves, ~leaves))
        left, stayed = hidden[at_leaving], hidden[at_staying]
        known = known[at_leaving] if known is not None else None
        batch = self._parts.load(packed.take(leaving), left)
        exited.add(leaving, known if known is not None else self._parts.logits(batch))
        self._parts.write_keys(batch, view.layer)
        return staying, self._parts.load(packed.take(staying), stayed)


def _index(columns: _Columns, like: Tensor) -> Tensor:
    """Return an index tensor on the device; copied asynchronously."""
    return torch.from_numpy(columns).pin_memory().to(like.device, non_blocking=True)
