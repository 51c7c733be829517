"""Early exit on one CUDA device: decode steps part by part, with a policy deciding between parts which tokens exit.

Each part is a graph (see ``parts.py``), so the overhead of a step is that of the policy: its arithmetic, and one
transfer of its decision to the host per evaluation. A pass is launched up to the first decision and finished when its
rows are needed, so that the host works while the device decides. Exited tokens get keys and values in all remaining
layers at once, from their state at the exit; the others continue in a smaller batch.

Source: as in ``enginehouse_hf.exits``, state propagation of CALM (Schuster et al., 2022, arXiv:2207.07061).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_hf.cuda.packing import PackedSpans
from enginehouse_hf.cuda.parts import NetworkParts, TokenBatch

__all__ = ["CudaExits", "ExitPass", "Exited"]

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


class _Decision:
    """The answer of a policy, which a GPU may still be computing: (num_rows,) bool."""

    def __init__(self, mask: Any) -> None:
        self._mask, self._is_copied = mask, None
        if isinstance(mask, Tensor) and mask.is_cuda:
            self._mask = torch.empty(mask.shape, dtype=mask.dtype, pin_memory=True)
            self._mask.copy_(mask, non_blocking=True)
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()

    def read(self) -> NDArray[np.bool_]:
        """Wait for the answer."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        return np.asarray(self._mask)


class CudaExits:
    """Decode steps with early exit.

    Args:
        parts: the parts of the model, recorded for the layers of the policy.
        policy: decides the exits.
    """

    def __init__(self, parts: NetworkParts, policy: BoundExitPolicy) -> None:
        self._parts, self._policy = parts, policy
        self._all_left = False  # in the last pass, at the first decision

    def stage(self, packed: PackedSpans) -> Tensor:
        """Return the input of a pass over plain decodes, while the pass before it goes on."""
        return self._parts.stage(packed)

    def begin(self, packed: PackedSpans, staged: Tensor) -> ExitPass:
        """Launch a pass over plain decodes, in their order, up to the first decision; waits for nothing.

        It must be finished before another pass begins.
        """
        return ExitPass(self._parts, self._policy, packed, staged)

    def finish(self, begun: ExitPass) -> Exited:
        """Run a pass to its end; waits for the device at every decision."""
        exited = begun.finish()
        self._all_left = bool((exited.layers == self._policy.layers[0]).all())
        return exited

    def foreseen(self, begun: ExitPass) -> Tensor | None:
        """Return the logits with which the pass ends if all tokens leave at the first decision, as in the last pass.

        (num_tokens, vocab_size); None if they stayed, or if the policy did not ask for logits.
        """
        return begun.known_logits if self._all_left else None


class ExitPass:
    """A pass that waits for its next decision."""

    def __init__(self, parts: NetworkParts, policy: BoundExitPolicy, packed: PackedSpans, staged: Tensor) -> None:
        self._parts, self._policy, self._packed = parts, policy, packed
        self._exited = Exited(np.full(packed.num_decodes, parts.num_layers))
        self._inside: _Columns = np.arange(packed.num_decodes)
        self._batch = parts.load(packed, staged=staged)
        self._view, self._decision = self._ask(0, policy.layers[0])

    @property
    def known_logits(self) -> Tensor | None:
        """Logits that the policy has asked for, of the tokens that have not exited."""
        return self._view.computed[0] if self._view.computed else None

    def finish(self) -> Exited:
        """See :meth:`CudaExits.finish`."""
        layers = self._policy.layers
        for layer, following in zip(layers, (*layers[1:], None), strict=True):
            leaves = self._decision.read()
            if leaves.any():
                self._exited.layers[self._inside[leaves]] = layer
                self._part_ways(leaves)
                if not len(self._inside):
                    return self._exited
            if following is not None:
                self._view, self._decision = self._ask(layer, following)
        self._parts.run_layers(self._batch, layers[-1], self._parts.num_layers)
        self._exited.add(self._inside, self._parts.logits(self._batch))
        return self._exited

    def _ask(self, begin: int, layer: int) -> tuple[_View, _Decision]:
        """Run the layers from ``begin`` to ``layer``, and let the policy decide there."""
        self._parts.run_layers(self._batch, begin, layer)
        view = _View(layer, self._parts, self._batch)
        return view, _Decision(self._policy.leaves(view))

    def _part_ways(self, leaves: NDArray[np.bool_]) -> None:
        """Compute logits and remaining keys of exiting tokens; go on with the other ones."""
        exited, parts, view = self._exited, self._parts, self._view
        leaving, self._inside = self._inside[leaves], self._inside[~leaves]
        known = self.known_logits
        if not len(self._inside):
            exited.add(leaving, known if known is not None else parts.logits(self._batch))
            parts.write_keys(self._batch, view.layer)
            return
        hidden = self._batch.hidden
        at_leaving, at_staying = (_index(np.flatnonzero(mask), hidden) for mask in (leaves, ~leaves))
        left, stayed = hidden[at_leaving], hidden[at_staying]
        known = known[at_leaving] if known is not None else None
        batch = parts.load(self._packed.take(leaving), left)
        exited.add(leaving, known if known is not None else parts.logits(batch))
        parts.write_keys(batch, view.layer)
        self._batch = parts.load(self._packed.take(self._inside), stayed)


def _index(columns: _Columns, like: Tensor) -> Tensor:
    """Return an index tensor on the device; copied asynchronously."""
    return torch.from_numpy(columns).pin_memory().to(like.device, non_blocking=True)
