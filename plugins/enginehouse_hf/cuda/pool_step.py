"""Step over the pool, called by the layers of a transformers model in place of their own attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.step import Step

__all__ = ["PoolStep"]


class PoolStep:
    """Implements :class:`enginehouse_hf.attention.AnyStep` for one step; fills the pool."""

    def __init__(self, step: Step, attention: PoolAttention) -> None:
        self._step, self._attention, self._places = step, attention, step.places.long()
        self._num_shared = 0

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Append keys and values and attend; query (1, H, T, D) gives (1, T, H, D)."""
        if index < 0:  # a module that several layers share: see ``enginehouse_hf.attention.Step``
            index, self._num_shared = index - self._num_shared, self._num_shared + 1
        self.append(index, key, value)
        packed = query[0].transpose(0, 1).contiguous()
        return self._attention.attend(self._step, index, packed, **scores)[None]

    def append(self, index: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of a layer, (1, H, T, D)."""
        keys, values = self._step.state.layers[index]
        keys.write(self._places, key[0].transpose(0, 1))
        values.write(self._places, value[0].transpose(0, 1))
