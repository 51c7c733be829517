"""KV memory in slots, passed to mlx-lm models in place of their own caches.

An mlx-lm layer requests three things from its cache: the position offset of the new tokens, all keys and values after
appending the new ones, and the attention mask. :class:`LayerCache` provides them for the sequences of the current
batch, so that any set of slots can share a forward pass, and a sequence can be cut or copied at any length, including
sliding-window layers (they keep every position and mask those outside the window). Recurrent layers get states instead,
see ``recurrent.py``.

Source: the attributes that mlx-lm's models use of its ``BatchKVCache`` (mlx_lm/models/cache.py);
the memory layout and the masks are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from enginehouse.contract.errors import ModelLoadError
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.recurrent import Form, StateCache

__all__ = ["LayerCache", "SlotMemory"]

_GROWTH_TOKENS = 256


class LayerCache:
    """Cache interface of one layer.

    Attributes:
        keys, values: (num_slots, num_kv_heads, capacity, head_dim); None before the first pass.
        batch: the batch whose tokens are being appended.
        window: the layer attends to this many tokens, including the current one; None is all.
    """

    def __init__(self, window: int | None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.batch: Batch | None = None
        self.window = window

    @property
    def offset(self) -> int | mx.array:
        """See :attr:`Batch.offset`."""
        return self._batch.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, H, N, D) keys and values; returns all of them, (B, H, max_length, D), masked ones included."""
        self.keys, self.values = self._append(self.keys, keys), self._append(self.values, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the same as ``update_and_fetch``; models that share KV between layers read it again."""
        assert self.keys is not None and self.values is not None
        return self._rows(self.keys), self._rows(self.values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask in mlx-lm's form: None, ``"causal"``, or (B, 1, N, max_length) bool, True where visible."""
        batch = self._batch
        window = window_size or self.window
        if window is not None and batch.max_length <= window:
            window = None
        ends_together = len(batch.slots) == 1 and batch.max_length == batch.starts[0] + N
        if window is None and ends_together and not return_array:
            return None if N == 1 else "causal"
        queries = batch.positions[:, None, :, None]
        keys = mx.arange(batch.max_length)
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        if self.keys is None or self.values is None or length == 0:
            return
        for memory in (self.keys, self.values):
            memory[target, :, :length] = memory[source, :, :length]

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Reserve memory. Before the first pass the shape is unknown, and ``update_and_fetch`` allocates it."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (_grown(m, num_slots, num_tokens) for m in (self.keys, self.values))

    @property
    def _batch(self) -> Batch:
        assert self.batch is not None, "the model ran before SlotMemory.begin"
        return self.batch

    def _append(self, memory: mx.array | None, new: mx.array) -> mx.array:
        batch = self._batch
        if memory is None:
            memory = mx.zeros((0, new.shape[1], 0, new.shape[3]), new.dtype)
        memory = _grown(memory, max(batch.slots) + 1, batch.max_length)
        if len(batch.slots) == 1:  # slices only: an index instead of one would copy ``new``
            slot, start = batch.slots[0], batch.starts[0]
            memory[slot : slot + 1, :, start : start + batch.num_tokens] = new
            return memory
        rows = memory.flatten(0, 2)  # a view; with one index MLX has the fewest operations
        rows[batch.rows(*memory.shape[1:3])] = new.flatten(0, 2)
        return rows.reshape(memory.shape)

    def _rows(self, memory: mx.array) -> mx.array:
        slots, length = self._batch.slots, self._batch.max_length
        if slots == tuple(range(slots[0], slots[0] + len(slots))):
            return memory[slots[0] : slots[0] + len(slots), :, :length]  # adjacent slots: no copy
        return memory[:, :, :length][mx.array(slots)]


class SlotMemory:
    """The caches of all layers.

    Attributes:
        caches: what the model is called with, in the order of its own caches.
        layers: the caches of keys and values among them.
        states: the caches of recurrent layers.
    """

    def __init__(self, model: Any) -> None:
        """Create a cache for each layer of an mlx-lm model.

        Raises:
            ModelLoadError: the model needs a cache other than keys and values or states.
        """
        self.layers: list[LayerCache] = []
        self.states: list[StateCache] = []
        self.caches = [self._make(cache) for cache in make_prompt_cache(model)]

    def begin(self, batch: Batch) -> list[Any]:
        """Return the caches to call the model with for this batch."""
        for layer in self.layers:
            layer.batch = batch
        for states in self.states:
            states.begin(batch)
        return self.caches

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """If the code inside fails, the states of recurrent layers are restored.

        Keys and values need not be: new ones are beyond the lengths of all sequences.
        """
        undo = [states.begin_pass() for states in self.states]
        try:
            yield
        except BaseException:
            for one in undo:
                one()
            raise

    def read(self, slot: int, length: int) -> list[mx.array]:
        """Keys and values of the first ``length`` positions of a slot, (num_kv_heads, length, head_dim) each."""
        return [memory[slot, :, :length] for memory in self.arrays]

    def write(self, slot: int, saved: Sequence[mx.array]) -> None:
        """Fill the beginning of a slot with the result of :meth:`read`."""
        arrays = iter(saved)
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                keys, values = next(arrays), next(arrays)
                length = keys.shape[1]
                layer.reserve(slot + 1, length)
                layer.keys[slot, :, :length], layer.values[slot, :, :length] = keys, values
        mx.eval(self.arrays)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another, in all layers."""
        for layer in self.layers:
            layer.reserve(target + 1, length)
            layer.copy(source, target, length)
        mx.eval(self.arrays)

    @property
    def state_forms(self) -> list[Form]:
        """Forms of the states of all recurrent layers, which must have run once."""
        return [form for states in self.states for form in states.forms if form is not None]

    @property
    def changed(self) -> list[mx.array]:
        """Arrays that a pass has changed, to be evaluated."""
        return [*self.arrays, *(array for states in self.states for array in states.arrays)]

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values of all layers."""
        return [memory for layer in self.layers for memory in (layer.keys, layer.values) if memory is not None]

    def _make(self, cache: Any) -> Any:
        """Return our cache in place of a model's own one; may be a group of caches of one layer."""
        if type(cache) is CacheList:
            return CacheList(*(self._make(part) for part in cache.caches))
        if type(cache) is ArraysCache:
            self.states.append(StateCache(len(cache.cache)))
            return self.states[-1]
        self.layers.append(LayerCache(_window(cache)))
        return self.layers[-1]


def _grown(memory: mx.array, num_slots: int, num_tokens: int) -> mx.array:
    """Return the memory enlarged to ``num_slots`` and ``num_tokens``; grows rarely, by whole blocks of tokens."""
    old_slots, num_heads, old_tokens, head_dim = memory.shape
    if num_slots <= old_slots and num_tokens <= old_tokens:
        return memory
    tokens = -(-num_tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS
    shape = max(num_slots, old_slots), num_heads, max(tokens, old_tokens), head_dim
    grown = mx.zeros(shape, memory.dtype)
    if old_slots and old_tokens:
        grown[:old_slots, :, :old_tokens] = memory
    return grown


def _window(cache: Any) -> int | None:
    """Return the sliding window of a model's own cache, in tokens."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    raise ModelLoadError(f"a model with {type(cache).__name__} layers is not supported by the mlx backend")
