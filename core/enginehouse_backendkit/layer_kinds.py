"""Kinds of the layers of a model, from its ``config.json``: with keys and values, with a state, or both.

Used by :class:`enginehouse_backendkit.model_folder.ModelFolder` to estimate memory. The names of the keys are those of
transformers' configurations; models that list no kinds have attention in every layer.

Source: the classes ``Qwen3NextConfig``, ``Lfm2Config``, ``BambaConfig``, ``JambaConfig``, ``NemotronHConfig``,
``Zamba2Config``, ``FalconH1Config`` and ``Mamba2Config`` of transformers 5.24, and older files of these models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

__all__ = ["LayerCounts", "count_layers", "has_states", "state_size"]

_Size = Callable[..., int]
"""Reads a size from the configuration: its key, and a value if it is missing or 0."""

_BOTH = frozenset({"hybrid"})
_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention", "*"}) | _BOTH
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "M"}) | _BOTH


@frozen
class LayerCounts:
    """Number of layers with keys and values, and of those with a state; some models have both in a layer."""

    attention: int
    recurrent: int = 0


def has_states(config: Mapping[str, Any]) -> bool:
    """Return True if some layers of a model may be recurrent."""
    return any(
        key in config
        for key in ("linear_num_value_heads", "conv_L_cache", "mamba_d_state", "ssm_state_size", "state_size")
    )


def count_layers(config: Mapping[str, Any], size: _Size) -> LayerCounts:
    """Count the layers by kind.

    Args:
        config: the text part of the configuration.
    """
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    kinds = list(map(str, kinds)) if isinstance(kinds, Sequence) else []
    if _RECURRENT & set(kinds):
        return LayerCounts(sum(kind in _ATTENTION for kind in kinds), sum(kind in _RECURRENT for kind in kinds))
    num_layers = size("num_hidden_layers")
    if not has_states(config):
        return LayerCounts(num_layers)
    if "num_attention_heads" not in config:
        return LayerCounts(0, num_layers)
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(config.get(key), list):
            return LayerCounts(len(config[key]), max(0, num_layers - len(config[key])))
    for key in ("attn_layer_period", "full_attention_interval"):
        if key in config:
            attention = num_layers // size(key)
            return LayerCounts(attention, num_layers - attention)
    return LayerCounts(num_layers, num_layers)


def state_size(config: Mapping[str, Any], size: _Size) -> int:
    """Return the number of elements of the state of a sequence in one recurrent layer."""
    if "linear_num_value_heads" in config:
        keys = size("linear_num_key_heads") * size("linear_key_head_dim")
        values = size("linear_num_value_heads") * size("linear_value_head_dim")
        return values * size("linear_key_head_dim") + (2 * keys + values) * size("linear_conv_kernel_dim", 4)
    if "conv_L_cache" in config:
        return size("hidden_size") * size("conv_L_cache")
    inner = size("mamba_d_ssm", 0) or size("mamba_num_heads", 0) * size("mamba_head_dim", 0)  # Falcon-H1, Nemotron-H
    inner = inner or size("hidden_size") * (size("mamba_expand", 0) or size("expand", 2))
    width = max(size(key, 0) for key in ("mamba_d_state", "ssm_state_size", "state_size"))
    groups = max(size(key, 0) for key in ("mamba_n_groups", "mamba_ngroups", "n_groups"))
    return inner * width + (inner + 2 * groups * width) * max(size("mamba_d_conv", 0), size("conv_kernel", 4))
