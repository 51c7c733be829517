"""``generation_settings``: the parameters in force, by llama-server's names and with its members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginehouse.contract.surface import Chunk
from enginehouse_llama_server.requests import FIELD_NAMES

__all__ = ["generation_settings"]

_OFF: Mapping[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "lora": [],
}
"""Fields of samplers at their defaults, and members that are fixed here."""


def generation_settings(parameters: Mapping[str, Any], **more: Any) -> Chunk:
    """Return the member.

    Args:
        parameters: by the names of request fields.
        more: further members.
    """
    shown = {FIELD_NAMES.get(name, name): value for name, value in parameters.items()}
    limit = shown.pop("n_predict", None)
    limit = -1 if limit is None else limit
    biases = shown.pop("logit_bias", None) or {}
    shown.pop("num_logprobs", None)
    return {
        **_OFF,
        **shown,
        "n_predict": limit,
        "max_tokens": limit,
        "logit_bias": [{"token": int(token), "bias": bias} for token, bias in biases.items()],
        **more,
    }
