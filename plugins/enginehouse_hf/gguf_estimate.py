"""Memory estimate for a dequantised GGUF file, from its header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from enginehouse.contract.backend import MemoryEstimate
from enginehouse_backendkit.gguf_reader import GgufReader, Value, reading

__all__ = ["estimate_gguf"]

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_MAX_SIZE = 2**31
_MAX_WEIGHTS = 2**50


def estimate_gguf(path: Path, context_tokens: int, dtype: str, *, copies_output: bool = False) -> MemoryEstimate:
    """Bytes of all weights in ``dtype`` plus KV for ``context_tokens`` positions.

    Args:
        copies_output: the output layer has weights of its own even if the file has none for it (tied embeddings).

    Raises:
        ModelLoadError: the file is not a GGUF file, or its sizes are missing or implausible.
    """
    size_bytes = 4 if dtype == "float32" else 2
    with reading(path) as file:
        reader = GgufReader(file)
        values = {entry.key: entry.value for entry in reader.entries() if entry.value is not None}
        numbers = {tensor.name: tensor.num_elements for tensor in reader.tensors()}
        num_weights = sum(numbers.values())
        if copies_output and _OUTPUT not in numbers:
            num_weights += numbers.get(_EMBEDDING, 0)
        if num_weights > _MAX_WEIGHTS:
            raise ValueError(f"it claims to hold {num_weights} weights")
        architecture = str(values.get("general.architecture", ""))
        heads = _size(values, f"{architecture}.attention.head_count")
        kv_heads = _size(values, f"{architecture}.attention.head_count_kv")
        has_head_dim = f"{architecture}.attention.key_length" in values
        head_dim = (
            _size(values, f"{architecture}.attention.key_length")
            if has_head_dim
            else _size(values, f"{architecture}.embedding_length") // max(heads, 1)
        )
        per_token = 2 * _size(values, f"{architecture}.block_count") * kv_heads * head_dim * size_bytes
    weights = size_bytes * num_weights
    return MemoryEstimate(weights, per_token, weights + context_tokens * per_token)


def _size(values: Mapping[str, Value], key: str) -> int:
    """Return a model size, the maximum if it is given per layer; raises ValueError if it is not a size."""
    value = values.get(key)
    size = max(value, default=None) if isinstance(value, list) else value
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MAX_SIZE:
        raise ValueError(f"its {key} is {str(size)[:40]}")
    return size
