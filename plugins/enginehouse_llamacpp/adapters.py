"""Adapters (LoRA) in GGUF files: checked here, because llama.cpp ends the process on some, then loaded by llama.cpp.

A context has one set of adapters, so the runner applies the set of a pass before it decodes.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from pathlib import Path

import numpy as np

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan
from enginehouse.contract.regular_files import open_regular
from enginehouse_backendkit.gguf_reader import ARRAY, Entry, GgufReader, TensorPlace, reading
from enginehouse_backendkit.lora_folder import check_invocation, refusing
from enginehouse_llamacpp.library import Library

__all__ = ["Adapters", "check_adapter_file", "read_invocation_tokens"]

_TEXT, _FLOAT32, _UINT32 = 8, 6, 4
_TYPES = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype("<u2")}
"""Types of tensors: float32, float16, and bfloat16 as its bits."""

_TARGETS = re.compile(r"(blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))|output|token_embd)\.weight\.lora_[ab]")
"""Weights that llama.cpp applies adapters to in every architecture; it ignores others without a word.

Source: ``build_lora_mm`` and ``build_inp_embd`` in llama-graph.cpp of llama-cpp-python 0.3.36."""

_INVOCATION = "adapter.alora.invocation_tokens"
_MAX_RANK = 1024


def check_adapter_file(path: Path) -> None:
    """Check everything that llama.cpp relies on or would ignore.

    Raises:
        AdapterRefused: names the file, and what is wrong.
    """
    with refusing(path):
        with reading(path) as file:
            reader = GgufReader(file)
            values = {entry.key: entry for entry in reader.entries()}
            tensors = list(reader.tensors())
            end = reader.position
        _check_values(values)
        alignment = values["general.alignment"].value if "general.alignment" in values else 32
        if not isinstance(alignment, int) or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment}")
        _check_tensors(path, tensors, -(-end // alignment) * alignment)


def _check_values(values: dict[str, Entry]) -> None:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        entry = values.get(key)
        if entry is None or entry.kind != _TEXT or entry.value != wanted:
            raise ValueError(f"it is not an adapter: {key} is not {wanted!r}")
    architecture, alpha = values.get("general.architecture"), values.get("adapter.lora.alpha")
    if architecture is None or architecture.kind != _TEXT:
        raise ValueError("general.architecture is missing")
    if alpha is not None and (alpha.kind != _FLOAT32 or not math.isfinite(float(str(alpha.value)))):
        raise ValueError(f"adapter.lora.alpha is {alpha.value}, a finite float32 was expected")
    _invocation_of(values)


def read_invocation_tokens(path: Path) -> tuple[int, ...]:
    """Return the tokens that activate an adapter (activated LoRA); () for others.

    Raises:
        AdapterRefused: names the file, and what is wrong.
    """
    with refusing(path):
        with reading(path) as file:
            values = {entry.key: entry for entry in GgufReader(file).entries()}
        return _invocation_of(values)


def _invocation_of(values: dict[str, Entry]) -> tuple[int, ...]:
    entry = values.get(_INVOCATION)
    if entry is None:
        return ()
    if (entry.kind, entry.item_kind) != (ARRAY, _UINT32):  # llama.cpp refuses other types
        raise ValueError(f"{_INVOCATION} is not an array of uint32")
    return check_invocation(entry.value, _INVOCATION)


def _check_tensors(path: Path, tensors: list[TensorPlace], data_begin: int) -> None:
    names = [tensor.name for tensor in tensors]
    if not tensors or len(set(names)) < len(names):
        raise ValueError("it has no tensors, or two of one name")
    ranks: dict[str, set[int]] = {}
    with open_regular(path) as file:
        num_bytes = file.seek(0, 2)
        for tensor in tensors:
            if not _TARGETS.fullmatch(tensor.name):
                raise ValueError(f"it changes {tensor.name!r}, which llama.cpp does not apply")
            shape, kind = _form(tensor)
            if kind not in _TYPES:
                raise ValueError(f"{tensor.name} has the type {kind}; float32, float16 and bfloat16 are supported")
            if len(shape) != 2 or 0 in shape:
                raise ValueError(f"{tensor.name} has the shape {shape}, two dimensions were expected")
            base, _, half = tensor.name.rpartition(".lora_")
            is_embedding = base.startswith("token_embd")
            ranks.setdefault(base, set()).add(shape[1 if (half == "a") != is_embedding else 0])
            begin, size = data_begin + tensor.offset, math.prod(shape) * _TYPES[kind].itemsize
            if begin + size > num_bytes:
                raise ValueError(f"it ends in {tensor.name}")
            file.seek(begin)
            if not _is_finite(np.frombuffer(file.read(size), _TYPES[kind])):
                raise ValueError(f"{tensor.name} has numbers that are not finite")
    for base, found in ranks.items():
        if f"{base}.lora_a" not in names or f"{base}.lora_b" not in names:
            raise ValueError(f"only one of {base}.lora_a and .lora_b is there")
        if not base.startswith("token_embd") and (len(found) != 1 or max(found) > _MAX_RANK):
            raise ValueError(f"the ranks of {base} are {sorted(found)}; one of at most {_MAX_RANK} was expected")


def _form(tensor: TensorPlace) -> tuple[tuple[int, ...], int]:
    """Return shape, first dimension first, and type of a tensor."""
    (name_bytes,) = struct.unpack_from("<Q", tensor.description)
    (num_dimensions,) = struct.unpack_from("<I", tensor.description, 8 + name_bytes)
    *shape, kind = struct.unpack_from(f"<{num_dimensions}QI", tensor.description, 12 + name_bytes)
    return tuple(shape), kind


def _is_finite(numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
    if numbers.dtype == np.uint16:  # bfloat16: all bits of the exponent are set
        return not bool(np.any((numbers & 0x7F80) == 0x7F80))
    return bool(np.isfinite(numbers).all())


class Adapters:
    """The loaded adapters of one model, and the set that its context has now.

    Args:
        context: address of the ``llama_context``.
    """

    def __init__(self, library: Library, model: int, context: int) -> None:
        self._library, self._model, self._context = library, model, context
        self._addresses: dict[int, int] = {}
        self._next = 1
        self._current: AdapterSet = ()

    def load(self, path: Path) -> int:
        """Load a file; return its handle. Raises AdapterRefused."""
        check_adapter_file(path)
        self._library.log.clear()
        address = self._library.bindings.llama_adapter_lora_init(self._model, str(path).encode())
        if not address:
            raise AdapterRefused(f"{path.name}: llama.cpp cannot load it: {self._library.log.reason()}", "adapters")
        handle, self._next = self._next, self._next + 1
        self._addresses[handle] = ctypes.cast(address, ctypes.c_void_p).value or 0
        return handle

    def unload(self, adapter: int) -> None:
        """Free an adapter."""
        if any(handle == adapter for handle, _ in self._current):
            self.use(())
        self._library.bindings.llama_adapter_lora_free(self._pointer(self._addresses.pop(adapter)))

    def check(self, adapters: AdapterSet) -> None:
        """Raise InvalidSpan if one of a set is not loaded."""
        for handle, _ in adapters:
            if handle not in self._addresses:
                raise InvalidSpan(f"adapter {handle} is not loaded")

    def use(self, adapters: AdapterSet) -> None:
        """Apply a checked set to the next passes; llama.cpp makes its graph anew if it differs from the last one."""
        if adapters == self._current:
            return
        bindings, count = self._library.bindings, len(adapters)
        pointers = (bindings.llama_adapter_lora_p_ctypes * max(count, 1))()
        scales = (ctypes.c_float * max(count, 1))()
        for index, (handle, scale) in enumerate(adapters):
            pointers[index], scales[index] = self._pointer(self._addresses[handle]), scale
        bindings.llama_set_adapters_lora(self._context, pointers, count, scales)
        self._current = adapters

    def _pointer(self, address: int) -> object:
        return ctypes.cast(address, self._library.bindings.llama_adapter_lora_p_ctypes)
