"""Memory that a GGUF file needs once it is dequantised, from its header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from enginehouse.backend import MemoryEstimate
from enginehouse.errors import ModelLoadError

__all__ = ["estimate_gguf"]


def estimate_gguf(path: Path, context_tokens: int, dtype: str) -> MemoryEstimate:
    """Bytes of all weights in ``dtype`` plus KV for ``context_tokens`` positions.

    Raises:
        ModelLoadError: the file is not a GGUF file or lacks the sizes.
    """
    size_bytes = 4 if dtype == "float32" else 2
    try:
        reader = GGUFReader(path)

        def value(key: str) -> Any:
            return reader.fields[key].contents()

        architecture = value("general.architecture")
        heads = value(f"{architecture}.attention.head_count")
        kv_heads = value(f"{architecture}.attention.head_count_kv")
        head_dim_key = f"{architecture}.attention.key_length"
        has_head_dim = head_dim_key in reader.fields
        head_dim = value(head_dim_key) if has_head_dim else value(f"{architecture}.embedding_length") // heads
        per_token = 2 * value(f"{architecture}.block_count") * kv_heads * head_dim * size_bytes
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelLoadError(f"{path} cannot be read as a GGUF file: {error}") from error
    weights = size_bytes * sum(int(tensor.n_elements) for tensor in reader.tensors)
    return MemoryEstimate(weights, per_token, weights + context_tokens * per_token)
