"""One forward pass as tensors: source and destination of its tokens, and the keys each token attends to.

The result of ``packing.py`` is copied to the device at once. Called by the runner; read by the networks.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from enginehouse_hf.cuda.kv_tensor import KvTensor
from enginehouse_hf.cuda.layers import begin_step
from enginehouse_hf.cuda.packing import PackedSpans, Segment, flatten
from enginehouse_hf.cuda.state_pools import NO_STATES, StatePools
from enginehouse_hf.cuda.structure import Rotary, at_positions

__all__ = ["DeviceState", "EmbeddedChunk", "Step", "padded_decodes"]


@frozen(eq=False)
class DeviceState:
    """State kept on the device between steps.

    Attributes:
        layers: by index, keys and values of each layer with attention, of num_places + 1 places; the last is a dump.
        num_places: number of places without the dump.
        table: (max_sequences + 1, max_context) int32, the place of every position; the last row is a dump.
        last: (max_sequences + 1,) int32, the last token drawn for each sequence.
        pools: states of recurrent layers.
    """

    layers: dict[int, tuple[KvTensor, KvTensor]]
    num_places: int
    table: Tensor
    last: Tensor
    pools: StatePools = NO_STATES

    @property
    def tensors(self) -> list[Tensor]:
        """Memory of all layers, (num_places + 1, ...) each, in a fixed order."""
        return [tensor for layer in self.layers.values() for part in layer for tensor in part.tensors]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per place over all layers."""
        return sum(tensor[0].nbytes for tensor in self.tensors)

    @property
    def dump_slot(self) -> int:
        """Row used by padding."""
        return self.table.shape[0] - 1

    @property
    def dump_place(self) -> int:
        """Place written by padding."""
        return self.num_places


@define(eq=False)
class EmbeddedChunk:
    """An image, or a part of it, as the input of a step.

    Attributes:
        embedding: (T, hidden_size), in the dtype of the model; may be changed by the step.
        positions: (3, T) int64, time, row and column of each token for the rotary embedding (M-RoPE); None if the
            model numbers images as text.
    """

    embedding: Tensor
    positions: Tensor | None
    _tables: dict[int, Rotary] = field(factory=dict, init=False)

    def turned(self, rotary: Rotary) -> Rotary:
        """Return the rotary tables of the tokens, (T, ...), with ``positions``; once for the layers that share them."""
        assert self.positions is not None
        if id(rotary) not in self._tables:
            self._tables[id(rotary)] = at_positions(rotary, self.positions)
        return self._tables[id(rotary)]

    @classmethod
    def upload(cls, embedding: Tensor, positions: Tensor | None, device: torch.device) -> EmbeddedChunk:
        """Upload the input of a step from host memory, without waiting for earlier steps."""
        parts = (None if part is None else part.contiguous().pin_memory() for part in (embedding, positions))
        return cls(*(None if part is None else part.to(device, non_blocking=True) for part in parts))


class Step:
    """A forward pass on the device.

    Attributes:
        num_tokens: T.
        num_decodes: number of leading tokens that attend individually.
        segments: the longer spans.
        token_ids: (T,) int64, valid after :meth:`begin`.
        slots, positions, places: (T,) int32.
        lengths: (num_decodes,) int32, number of tokens visible to each decode, itself included.
        gather: (num_seen,) int32, places visible to the longer spans, span by span.
        query_ends, key_ends: (len(segments) + 1,) int32, running sums of their tokens and of their visible places.
        rows: (num_rows,) int32 tokens whose logits are requested; None is all.
        state_rows: (K + 1, N) int32, rows of the states of recurrent layers, see ``packing.py``: of every decode and
            every longer span, or with K > 1 of sequences with K decodes each.
        scales: (num_adapters, T) float32, how much each token uses of each adapter; None if none uses any.
        num_layers: number of layers to run; None is all.
        rotary: (T,) int32, positions for the rotary embedding.
        chunk: input in place of the token ids; None for text.
    """

    def __init__(self, state: DeviceState, num_tokens: int, num_decodes: int, segments: list[Segment], ints: Tensor,
                 offsets: dict[str, tuple[int, int]], rows_are_all: bool, num_layers: int | None,
                 span_tokens: int, chunk: EmbeddedChunk | None = None) -> None:  # fmt: skip
        self.state, self.num_layers, self.chunk = state, num_layers, chunk
        self.num_tokens, self.num_decodes, self.segments = num_tokens, num_decodes, segments
        part = {name: ints[begin:end] for name, (begin, end) in offsets.items()}
        self._tokens = part["tokens"].view(4, -1)
        self.slots, self.positions, self.places = (row[:num_tokens] for row in self._tokens[1:])
        self.lengths = part["lengths"]
        self.gather, self.query_ends, self.key_ends = part["gather"], part["query_ends"], part["key_ends"]
        self.rows = None if rows_are_all else part["rows"]
        self.state_rows, self.rotary = part["state_rows"].view(span_tokens + 1, -1), part["rotary"]
        self.scales = part["scales"].view(torch.float32).view(-1, num_tokens) if len(part["scales"]) else None
        self.token_ids = torch.empty(num_tokens, dtype=torch.int64, device=ints.device)

    @classmethod
    def upload(
        cls, state: DeviceState, packed: PackedSpans, num_layers: int | None = None, chunk: EmbeddedChunk | None = None
    ) -> Step:
        """Upload the step to the device; one asynchronous copy from pinned memory."""
        array, offsets = flatten(packed)
        ints = torch.from_numpy(array).pin_memory().to(state.table.device, non_blocking=True)
        num_tokens, num_decodes = packed.tokens.shape[1], packed.num_decodes
        return cls(state, num_tokens, num_decodes, packed.segments, ints, offsets, packed.is_plain_decode, num_layers,
                   packed.span_tokens, chunk)  # fmt: skip

    @classmethod
    def static(
        cls,
        state: DeviceState,
        size: int,
        num_layers: int | None = None,
        num_adapters: int = 0,
        span_tokens: int = 1,
    ) -> tuple[Step, Tensor]:
        """Return a decode step of ``size`` sequences whose input is filled in later, and the tensor for this input.

        Args:
            num_adapters: number that fit into the stacks; 0 is a step without adapters.
            span_tokens: tokens of each sequence; more than one in a model with recurrent layers, for drafts.
        """
        scales, state_rows = np.empty((num_adapters, 0), np.float32), np.empty((span_tokens + 1, 0), np.int32)
        array, offsets = flatten(padded_decodes(state, PackedSpans(*_NOTHING, state_rows, scales), size))
        ints, num_tokens = torch.from_numpy(array).to(state.table.device), size * span_tokens
        return cls(state, num_tokens, num_tokens, [], ints, offsets, True, num_layers, span_tokens), ints

    @property
    def pools(self) -> StatePools:
        """States of recurrent layers of all sequences."""
        return self.state.pools

    def advance(self, token_ids: Tensor) -> None:
        """Make the inputs of a static decode step those of the next one: a token each, at places that the table has.

        Args:
            token_ids: (T,).
        """
        self._tokens[0, : self.num_tokens] = token_ids
        for numbers in (self.positions, self.rotary, self.lengths):
            numbers.add_(1)
        ahead = self.positions.clamp(max=self.state.table.shape[1] - 1).long()
        self.places.copy_(self.state.table[self.slots.long(), ahead])

    def begin(self) -> None:
        """Start the step: look up the token ids and write the places into the table."""
        begin_step(self._tokens, self.state.last, self.state.table, self.token_ids)


_NOTHING = (np.empty((4, 0), np.int32), 0, [], np.empty(0, np.int32), np.empty(0, np.int32))


def padded_decodes(state: DeviceState, packed: PackedSpans, size: int) -> PackedSpans:
    """Pad plain decodes, of which each sequence has K, to ``size`` sequences that read and write only the dumps."""
    by_place = packed.tokens.reshape(4, packed.span_tokens, -1)
    num_more = size - by_place.shape[2]
    dump = np.array([0, state.dump_slot, 0, state.dump_place], np.int32)[:, None, None]
    more = np.broadcast_to(dump, (4, packed.span_tokens, num_more))
    tokens = np.concatenate([by_place, more], 2).reshape(4, -1)
    num_dumped = num_more if state.pools.forms else 0
    dumped = np.repeat(state.pools.dump_rows(packed.span_tokens)[:, None], num_dumped, 1)
    state_rows = np.concatenate([packed.state_rows, dumped], 1)
    num_tokens = tokens.shape[1]
    rotary = packed.rotary_positions.reshape(packed.span_tokens, -1)
    rotary = np.concatenate([rotary, np.zeros((packed.span_tokens, num_more), np.int32)], 1).reshape(-1)
    num_sequences = by_place.shape[2]
    scales = np.zeros((len(packed.scales), packed.span_tokens, size), np.float32)
    scales[:, :, :num_sequences] = packed.scales.reshape(len(scales), packed.span_tokens, num_sequences)
    scales = scales.reshape(len(scales), num_tokens)
    rows = np.arange(num_tokens, dtype=np.int32)
    return PackedSpans(tokens, num_tokens, [], packed.gather, rows, state_rows, scales, rotary)
