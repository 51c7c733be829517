"""Layers of the fake model: logits after fewer layers, and early exit by a policy."""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_testkit.fake_model import FakeModel, State

__all__ = ["FakeExits", "FakeView"]

_HIDDEN_SIZE = 16


@frozen(eq=False)
class FakeView:
    """See :class:`enginehouse.contract.exit_policy.ExitView`; a view of one token."""

    layer: int
    hidden: NDArray[np.float32]
    previous_hidden: NDArray[np.float32]
    row: NDArray[np.float32]

    def logits(self) -> NDArray[np.float32]:
        """Return (1, vocab_size) float32."""
        return self.row[None]


@define(eq=False)
class FakeExits:
    """Layers that converge to the output of the last one; ``policy`` is called after each of its layers."""

    model: FakeModel
    num_layers: int
    policy: BoundExitPolicy | None = field(default=None, init=False)

    def logits(self, state: State, layer: int) -> NDArray[np.float32]:
        """Return the logits after ``layer`` layers, (vocab_size,) float32."""
        share = np.float32(1.0 - layer / self.num_layers)
        return self.model.logits(state) + share * self.model.doubt(state)

    def leave(self, state: State) -> tuple[NDArray[np.float32], int]:
        """Return the row of one token, and the number of layers it ran through."""
        for layer in self.policy.layers if self.policy is not None else ():
            view = FakeView(
                layer, self._hidden(state, layer), self._hidden(state, layer - 1), self.logits(state, layer)
            )
            if self.policy is not None and np.asarray(self.policy.leaves(view))[0]:
                return view.row, layer
        return self.model.logits(state), self.num_layers

    def _hidden(self, state: State, layer: int) -> NDArray[np.float32]:
        """Return (1, 16) float32; later layers change it less."""
        end, doubt = self.model.logits(state)[:_HIDDEN_SIZE], self.model.doubt(state)[:_HIDDEN_SIZE]
        share = (1.0 - layer / self.num_layers) ** 2
        return (end + np.float32(share) * doubt)[None]
