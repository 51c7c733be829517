"""Memory estimate of poolers, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.contract.backend import MemoryEstimate
from enginehouse_backendkit.model_folder import ModelFolder
from enginehouse_hf.pooling.recipe import Dense, Recipe

__all__ = ["estimate_pooler"]

_HIDDEN = ("hidden_size", "d_model", "dim", "n_embd")
_INTERMEDIATE = ("intermediate_size", "d_ff", "hidden_dim", "n_inner")
_USUAL_HIDDEN = 1024
_ROWS = 10
"""Rows of ``hidden_size`` that live at once while a layer runs: states, query, key, value, residuals."""


_PROCESS_BYTES = 448 * 2**20
"""Main memory of a worker without a model: torch and transformers, which is more than many encoders need. Measured."""


def estimate_pooler(recipe: Recipe, dtype: str, pass_tokens: int, *, is_cpu: bool) -> MemoryEstimate:
    """Bytes of all weights in ``dtype`` and of the states of one pass, in main memory also of the libraries.

    KV memory is not needed.
    """
    weights = ModelFolder(recipe.transformer, dict(recipe.config)).weights_bytes(dtype)
    size_bytes = 4 if dtype == "float32" else 2
    weights += sum(m.in_features * m.out_features * size_bytes for m in recipe.modules if isinstance(m, Dense))
    hidden = _size(recipe.config, _HIDDEN, _USUAL_HIDDEN)
    row = _ROWS * hidden + 2 * _size(recipe.config, _INTERMEDIATE, 4 * hidden)
    process_bytes = _PROCESS_BYTES if is_cpu else 0
    return MemoryEstimate(weights, 0, weights + pass_tokens * row * size_bytes + process_bytes)


def _size(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    text = config.get("text_config")
    for key in keys:
        value = (text if isinstance(text, Mapping) else config).get(key)
        if isinstance(value, int) and 0 < value < 2**24:
            return value
    return default
