"""Memory of a draft head in the pool, and the features that networks write there.

The pair of a position (see ``heads/drafting.py``) has the place of the token after it: that token is part of the pair,
and a place may be shared by sequences that agree up to it only. So the head has a table of its own, one position behind
that of the model. Features are the keys of a layer without values, at their own positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.packing import PackedSpans, pack
from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.step import DeviceState, Step
from enginehouse_hf.heads.drafting import DraftHead, Pairs

__all__ = ["FeatureWriter", "PoolHeadMemory"]


class FeatureWriter:
    """Receives the states of a pass over all layers from a network, and writes the features of its tokens.

    Args:
        head: makes the features.
        layer: index of their layer in the pool.
    """

    def __init__(self, head: DraftHead, layer: int) -> None:
        self.reads = frozenset(head.reads)
        self._head, self._layer = head, layer
        self._seen: dict[int | None, Tensor] = {}

    def note(self, layer: int | None, states: Tensor) -> None:
        """Keep the states after a layer, or after the output norm (None): (T, hidden_size), not changed later."""
        self._seen[layer] = states

    def write(self, step: Step) -> None:
        """Write the features of all tokens of a step."""
        features = self._head.features([self._seen[layer] for layer in self._head.reads])
        kept, _ = step.state.layers[self._layer]
        kept.index_copy_(0, step.places.long(), features[:, None].to(kept.dtype))
        self._seen.clear()


class _Shapes:
    """Stands for a step, to find the shapes of the head's keys and values."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def attend(self, _index: int, query: Tensor, key: Tensor, value: Tensor, **_scores: Any) -> Tensor:
        """Implements :class:`enginehouse_hf.attention.AnyStep`."""
        self.found = [(part.shape[1], part.shape[3]) for part in (key, value)]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class PoolHeadMemory:
    """Implements :class:`enginehouse_hf.heads.drafting.HeadMemory`.

    Args:
        head: the head; its attention uses the layer after those of the model.
        state: the pool; gets two more layers.
        positions: the places of all sequences.
        hidden_size: width of the model's states.

    Raises:
        ModelLoadError: there is not enough device memory, or the layers of the model share keys and values.
    """

    def __init__(self, head: DraftHead, state: DeviceState, positions: PositionPool, hidden_size: int) -> None:
        self._head, self._model_state, self._positions = head, state, positions
        self._attention = PoolAttention(None)
        like, _ = state.layers[0]
        zeros = [like.new_zeros(1, hidden_size)] * len(head.reads)
        nothing, shapes = torch.zeros(1, dtype=torch.int64, device=like.device), _Shapes()
        with torch.inference_mode():
            features = head.features(zeros)
            head.logits(head.run(nothing, features, nothing, shapes))
        forms = [*shapes.found, (1, features.shape[-1]), (1, 0)]
        try:
            keys, values, kept, empty = (like.new_zeros(len(like), heads, dim) for heads, dim in forms)
            table = torch.zeros_like(state.table)
        except torch.cuda.OutOfMemoryError as error:
            num_bytes = len(like) * sum(heads * dim for heads, dim in forms) * like.itemsize
            raise ModelLoadError(
                f"the draft head needs {num_bytes / 2**30:.1f} GiB for {len(like) - 1} KV positions beside the "
                "model's; lower cache_tokens or memory_share"
            ) from error
        self.writer = FeatureWriter(head, len(state.layers) + 1)
        self._features = kept
        first = len(state.layers)
        state.layers[first], state.layers[first + 1] = (keys, values), (kept, empty)
        self._state = DeviceState(state.layers, state.num_places, table, state.last)

    def run(self, pairs: Sequence[Pairs], features: Tensor | None = None) -> Tensor:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        packed = self._pack(pairs)
        rows = torch.from_numpy(packed.rows.astype(np.int64)).to(self._features.device)
        if features is None:
            slots, at = packed.tokens[1], packed.tokens[2]
            given = self._features[self._on_device(self._positions.table[slots, at]), 0]
            self._copy_table([one.sequence for one in pairs])
        else:
            given = torch.empty_like(features)
            given[rows] = features
        step = Step.upload(self._state, packed)
        step.begin()
        return self._head.run(step.token_ids, given, step.positions.long(), PoolStep(step, self._attention))[rows]

    def drop_drafts(self, sequence: int, length: int) -> None:
        """See :class:`enginehouse_hf.heads.drafting.HeadMemory`."""
        self._positions.truncate(sequence, length)

    def close(self) -> None:
        """Nothing to stop: the network ends with the model."""

    def _pack(self, pairs: Sequence[Pairs]) -> PackedSpans:
        """Allocate places for pairs beyond the text, and pack all pairs as if they were tokens."""
        lengths = [self._positions.length(one.sequence) for one in pairs]
        beyond = [
            Span(one.sequence, length, np.zeros(one.stop + 1 - length, np.int32), "none")
            for one, length in zip(pairs, lengths, strict=True)
            if one.stop >= length
        ]
        if beyond:
            self._positions.append(beyond, self._positions.check(beyond))
        table = self._positions.table[:, 1:]  # the place of the token after each position
        spans = [Span(one.sequence, one.start, np.array(one.token_ids, np.int32)) for one in pairs]
        places = np.concatenate([table[one.sequence, one.start : one.stop] for one in pairs])
        return pack(spans, [len(one.token_ids) for one in pairs], places, table)

    def _copy_table(self, sequences: Sequence[int]) -> None:
        """Take over the places of all tokens that the model holds."""
        slots = self._on_device(np.array(sequences, np.int32))
        self._state.table[slots, :-1] = self._model_state.table[slots, 1:]

    def _on_device(self, indices: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._features.device)
