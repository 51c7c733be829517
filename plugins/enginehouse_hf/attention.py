"""Attention over our own KV memory, plugged into transformers models.

The model is called with all spans packed into one row of tokens. Each layer hands its query, key and
value, rotary positions already applied, to :func:`slot_attention`, which appends keys and values to the
slots of the sequences and attends per span. transformers builds no mask and keeps no cache.

Source: the custom attention route that transformers documents under ``AttentionInterface``. A name that
is not in its mask registry makes it skip mask building; causality and sliding windows are applied here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from enginehouse_hf.pieces import copy_piece

__all__ = [
    "ATTENTION_NAME",
    "AnyStep",
    "ForwardAborted",
    "KvMemory",
    "Segment",
    "Step",
    "UnsupportedAttention",
    "slot_attention",
]

ATTENTION_NAME = "enginehouse"


class UnsupportedAttention(Exception):
    """The model uses a kind of attention that this runner would compute wrongly."""


class ForwardAborted(Exception):
    """``Runner.abort`` was called; no sequence has changed."""


class KvMemory:
    """Keys and values of all slots.

    Two tensors per layer of shape (num_slots, num_kv_heads, max_context, head_dim). The shape that a layer needs is
    known once the layer has run: a small memory serves for that first pass, and :meth:`resized` makes one of any size
    from it. On the CPU the memory pages of unused positions are never touched.
    """

    def __init__(self, num_slots: int, max_context: int) -> None:
        self._num_slots, self._max_context = num_slots, max_context
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Memory of one layer for keys and values shaped as ``key`` and ``value``, (1, H, T, D)."""
        if index not in self._layers:
            keys, values = (
                new.new_empty(self._num_slots, new.shape[1], self._max_context, new.shape[3]) for new in (key, value)
            )
            self._layers[index] = keys, values
        return self._layers[index]

    def known(self, index: int) -> tuple[Tensor, Tensor]:
        """Memory of a layer that has run."""
        return self._layers[index]

    @property
    def shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return (num_heads, head_dim) of keys and of values for each layer that has run."""
        return [
            ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
            for _, (keys, values) in sorted(self._layers.items())
        ]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position over all layers."""
        return sum(
            tensor.shape[1] * tensor.shape[3] * tensor.itemsize for memory in self._layers.values() for tensor in memory
        )

    def resized(self, num_slots: int, max_context: int) -> KvMemory:
        """Return an empty memory of another size for the layers that have run in this one."""
        memory = KvMemory(num_slots, max_context)
        for index, (key, value) in self._layers.items():
            memory.layer(index, key, value)
        return memory

    def pieces(self, slot: int, length: int) -> Iterator[Tensor]:
        """Yield views of one slot, keys then values of each layer: (num_kv_heads, length, head_dim)."""
        for _, memory in sorted(self._layers.items()):
            for tensor in memory:
                yield tensor[slot, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        with torch.inference_mode():
            for kept, copied in zip(self.pieces(source, length), self.pieces(target, length), strict=True):
                copy_piece(kept, copied)


class AnyStep(Protocol):
    """Receives query, key and value from each layer: :class:`Step`, or its CUDA counterpart."""

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Append keys and values and attend in layer ``index``; query (1, H, T, D) gives (1, T, H, D).

        Args:
            sinks: (H,), for each head the score of a further key whose value is zero.
        """
        ...


@frozen
class Segment:
    """One span in the packed row: columns ``begin`` to ``end`` are positions ``start`` to ``stop`` of ``slot``."""

    slot: int
    start: int
    begin: int
    end: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.end - self.begin


@define
class Step:
    """One forward pass: maps packed tokens to slots and positions.

    Attributes:
        aborted: checked once per layer.
        sees_ahead: the tokens of a segment attend to each other, not only to those before them.
        windows: filled with the sliding window of each layer that ran, in tokens or None.
        has_sinks: set when a layer has attention sinks.
    """

    memory: KvMemory
    segments: Sequence[Segment]
    aborted: threading.Event
    sees_ahead: bool = False
    windows: dict[int, int | None] = field(factory=dict)
    has_sinks: bool = False
    _masks: dict[tuple[int, int | None, torch.device], Tensor] = field(factory=dict)

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None,
        sinks: Tensor | None,
        **scores: Any,
    ) -> Tensor:
        """Implements :class:`AnyStep`."""
        if self.aborted.is_set():
            raise ForwardAborted
        if index < 0:  # a module that several layers share: they are told apart by their order
            index -= sum(other < 0 for other in self.windows)
        if index in self.windows:
            raise UnsupportedAttention("one number for several layers")
        self.windows[index] = window
        self.has_sinks |= sinks is not None
        keys, values = self.append(index, key, value)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for segment in self.segments:
            columns = slice(segment.begin, segment.end)
            output[0, columns] = self._attend_segment(
                segment, query[:, :, columns], keys, values, window=window, sinks=sinks, **scores
            )
        return output

    def append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a layer, (1, H, T, D), and return the layer's memory."""
        keys, values = self.memory.layer(index, key, value)
        for segment in self.segments:
            columns = slice(segment.begin, segment.end)
            keys[segment.slot, :, segment.start : segment.stop] = key[0, :, columns]
            values[segment.slot, :, segment.start : segment.stop] = value[0, :, columns]
        return keys, values

    def narrowed(self, columns: Sequence[int]) -> Step:
        """Return a step of some of the rows, each one column wide; ``columns`` selects them."""
        chosen = [self.segments[column] for column in columns]
        segments = [Segment(segment.slot, segment.start, place, place + 1) for place, segment in enumerate(chosen)]
        return Step(self.memory, segments, self.aborted)

    def _attend_segment(
        self,
        segment: Segment,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        num_heads, num_tokens, num_kv_heads = query.shape[1], query.shape[2], keys.shape[1]
        low = 0 if window is None else max(0, segment.start - window + 1)  # the oldest key any query sees
        seen_keys = keys[segment.slot : segment.slot + 1, :, low : segment.stop]  # (1, Hkv, L, D)
        seen_values = values[segment.slot : segment.slot + 1, :, low : segment.stop]
        group = num_heads // num_kv_heads
        # Query heads that share a key head become extra rows of that head, so no key is copied.
        grouped = query.reshape(1, num_kv_heads, group * num_tokens, query.shape[3])
        mask = None if num_tokens == 1 else self._mask(segment, low, window, query.device).repeat(group, 1)
        if softcap is None and sinks is None:
            result = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        else:
            scores = grouped @ seen_keys.transpose(2, 3) * scaling
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
            if sinks is not None:
                last = sinks.to(scores).view(1, num_kv_heads, group, 1).repeat_interleave(num_tokens, 2)
                scores = torch.cat([scores, last], -1)
            shares = torch.softmax(scores, -1, dtype=torch.float32).to(seen_values.dtype)
            result = shares[..., : seen_keys.shape[2]] @ seen_values
        return result.reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def _mask(self, segment: Segment, low: int, window: int | None, device: torch.device) -> Tensor:
        """Mask (num_tokens, L) bool, True where a query sees a key; equal for all layers with this window."""
        key = segment.slot, window, device
        if key not in self._masks:
            query_positions = torch.arange(segment.start, segment.stop, device=device)[:, None]
            key_positions = torch.arange(low, segment.stop, device=device)[None]
            newest = query_positions.clamp(min=segment.stop - 1) if self.sees_ahead else query_positions
            mask = key_positions <= newest
            if window is not None:
                mask &= key_positions > query_positions - window
            self._masks[key] = mask
        return self._masks[key]


_OF_OTHER_KERNELS = frozenset(
    {"position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
)
"""Tensors that models pass on to every attention function, without effect on the result here."""


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    enginehouse_step: AnyStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in each layer, with its signature.

    Raises:
        UnsupportedAttention: masks made by the model, attention that is not causal, or a tensor of unknown meaning.
        ForwardAborted: the step was aborted.
    """
    if attention_mask is not None:
        raise UnsupportedAttention("a mask of the model's own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("attention that is not causal")
    for name, other in others.items():
        if isinstance(other, Tensor) and name not in _OF_OTHER_KERNELS:
            raise UnsupportedAttention(f"attention with the argument {name!r}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    index = int(module.layer_idx)  # type: ignore[arg-type]
    output = enginehouse_step.attend(
        index, query, key, value, scaling=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
