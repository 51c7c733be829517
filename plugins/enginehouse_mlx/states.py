"""Saved sequences as bytes: core's header, then keys and values of all positions, layer by layer, then states.

Sliding-window layers keep every position here, so a saved sequence is cut and continued like any other. Of a model with
recurrent layers follow the number of checkpoints and the length of each, then their states and those of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, state_body, write_head
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.recurrent import Form, States

__all__ = ["pack_sequence", "state_format", "unpack_sequence"]

_SavedStates = Sequence[tuple[int, Sequence[States]]]
"""See :meth:`enginehouse_mlx.history.History.saved`."""

_WORD = np.dtype("<u4")


def state_format(memory: SlotMemory, metadata: Mapping[str, str]) -> str:
    """Return the format id, see :class:`enginehouse.contract.backend.StateKeeper`. The layers must have run once.

    Args:
        metadata: that of the model's information, of which library and architecture matter.
    """
    arrays = ", ".join(f"{shape} {dtype}" for shape, dtype in _forms(memory))
    computed = f"{metadata['library']}, architecture {metadata['architecture']}, {mx.default_device()}"
    found = f"{computed}, keys and values of each layer: {arrays}"
    if memory.states:
        found += ", states: " + ", ".join(f"{shape} {dtype}" for shape, dtype in memory.state_forms)
    return found


def pack_sequence(memory: SlotMemory, slot: int, num_tokens: int, saved: _SavedStates, state_format: str) -> memoryview:
    """Return a copy of the first ``num_tokens`` positions of a slot, and of its states."""
    arrays = [_as_bytes(array) for array in memory.read(slot, num_tokens)]
    if memory.states:
        lengths = [length for length, _ in saved if length]
        arrays.append(_as_bytes(mx.array([len(lengths), *lengths], mx.uint32)))
        for _, layers in saved:
            arrays += [_as_bytes(array) for states in layers for array in states if array is not None]
    mx.eval(arrays)
    data = memoryview(bytearray(HEAD_BYTES + sum(array.nbytes for array in arrays)))
    body, begin = np.frombuffer(state_body(data), np.uint8), 0
    for array in arrays:
        body[begin : begin + array.nbytes] = np.asarray(array).reshape(-1)
        begin += array.nbytes
    write_head(data, state_format, num_tokens)
    return data


def unpack_sequence(memory: SlotMemory, num_tokens: int, data: memoryview) -> tuple[Sequence[mx.array], _SavedStates]:
    """Return the arrays from which :meth:`SlotMemory.write` fills a slot, and states.

    Raises:
        StateRefused: the size of the data does not match ``num_tokens``.
    """
    body = np.frombuffer(state_body(data), np.uint8)
    forms: list[Form] = [((heads, num_tokens, width), dtype) for (heads, width), dtype in _forms(memory)]
    arrays, body = _take(body, forms)
    saved: list[tuple[int, Sequence[States]]] = []
    if memory.states:
        lengths, body = _take_lengths(body, num_tokens)
        for length in (*lengths, 0):
            states, body = _take(body, memory.state_forms)
            saved.append((length, _by_layer(memory, states)))
    if body.nbytes:
        raise StateRefused(f"the data holds more than {num_tokens} tokens of this model")
    return arrays, saved


def _take(body: NDArray[np.uint8], forms: Sequence[Form]) -> tuple[list[mx.array], NDArray[np.uint8]]:
    """Return the arrays at the beginning of the data, and what follows them. Raises StateRefused."""
    arrays = []
    for shape, dtype in forms:
        num_bytes = math.prod(shape) * dtype.size
        if body.nbytes < num_bytes:
            raise StateRefused("the data holds less than its tokens of this model")
        part, body = body[:num_bytes], body[num_bytes:]
        arrays.append(mx.view(mx.array(part.reshape(*shape[:-1], -1)), dtype))
    return arrays, body


def _take_lengths(body: NDArray[np.uint8], num_tokens: int) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the lengths of checkpoints, and what follows them. Raises StateRefused."""
    words = body[: body.nbytes // _WORD.itemsize * _WORD.itemsize].view(_WORD)
    num_lengths = int(words[0]) if len(words) else 0
    lengths = words[1 : 1 + num_lengths].tolist()
    is_ascending = lengths == sorted({*lengths}) and all(0 < length <= num_tokens for length in lengths)
    if len(words) <= num_lengths or not is_ascending:
        raise StateRefused("the lengths of its checkpoints are missing, not ascending, or beyond its end")
    return lengths, body[(1 + num_lengths) * _WORD.itemsize :]


def _by_layer(memory: SlotMemory, arrays: Sequence[mx.array]) -> list[States]:
    """Return the states of each layer from all arrays in their order."""
    left = iter(arrays)
    return [tuple(None if form is None else next(left) for form in layer.forms) for layer in memory.states]


def _forms(memory: SlotMemory) -> list[tuple[tuple[int, int], mx.Dtype]]:
    """Heads, numbers per head of one position, and dtype, for the keys and the values of each layer."""
    return [((array.shape[1], array.shape[3]), array.dtype) for array in memory.arrays]


def _as_bytes(array: mx.array) -> mx.array:
    return mx.view(mx.contiguous(array), mx.uint8)
