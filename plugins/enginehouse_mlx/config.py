"""Converts the ``config.json`` format of transformers 5 to the keys that mlx-lm reads.

transformers 5 collects the rotary settings in ``rope_parameters`` and the kinds of layers in ``layer_types``.
Most model classes of mlx-lm 0.32 read only the older top-level keys, and silently fall back to defaults: such a model
loads, and answers slightly wrongly. Existing keys are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["older_keys"]


def older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries to add to ``config``, for ``mlx_lm.load(model_config=...)``."""
    missing = {**_rotary_keys(config.get("rope_parameters") or {}), **_window_keys(config.get("layer_types") or ())}
    added = {key: value for key, value in missing.items() if config.get(key) is None}
    if isinstance(config.get("text_config"), Mapping):
        added["text_config"] = {**config["text_config"], **older_keys(config["text_config"])}
    return added


def _rotary_keys(parameters: Mapping[str, Any]) -> dict[str, Any]:
    if "full_attention" in parameters:  # one set per kind of layer
        local = parameters.get("sliding_attention", {})
        keys = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return {**_rotary_keys(parameters["full_attention"]), **keys}
    keys = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    is_scaled = parameters.get("rope_type", "default") != "default"
    return {**keys, "rope_scaling": dict(parameters)} if is_scaled else keys


def _window_keys(layer_types: Sequence[str]) -> dict[str, Any]:
    """``sliding_window_pattern``: the interval of layers with full attention."""
    if "full_attention" not in layer_types or "sliding_attention" not in layer_types:
        return {}
    period = layer_types.index("full_attention") + 1
    regular = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(len(layer_types))]
    return {"sliding_window_pattern": period} if list(layer_types) == regular else {}
