"""Request fields that are known but cannot be honoured yet: refused by name, never dropped in silence.

A field passes when its value asks for nothing (``"tools": []``). A field that an installed plugin
declares is not looked at here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from enginehouse.errors import UnsupportedParameter

__all__ = ["find_unsupported", "is_known", "refuse"]

_OFF: dict[str, tuple[Any, ...]] = {
    # Tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # Reasoning
    "reasoning_effort": (),
    "reasoning": ({},),
    "thinking": (),
    "thinking_budget": (),
    "enable_thinking": (),
    "include_reasoning": (),
    "verbosity": ("medium",),
    # Templates
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (),
    # Other inputs and outputs
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "input": (),
    "messages": (),
    "prompt": (),
    "peft": ({},),
    "lora": ([],),
    "loglikelihood": (False,),
    "log_prompt": (False,),
    "prompt_logprobs": (),
    "best_of": (),
    "echo": (False,),
    "suffix": ("",),
    # Sampling
    "xtc_probability": (0,),
    "xtc_threshold": (),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs_z": (1,),
    "top_n_sigma": (0, -1),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "mirostat_tau": (),
    "mirostat_eta": (),
    "dry_multiplier": (0,),
    "dry_base": (),
    "dry_allowed_length": (),
    "dry_penalty_last_n": (),
    "dry_sequence_breakers": (),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
"""Field name to the values that ask for nothing."""


def find_unsupported(data: Mapping[str, Any], declared: Collection[str], supported: Collection[str]) -> list[str]:
    """Names in ``data`` that ask for something that cannot be honoured.

    Args:
        data: the request, without null members.
        declared: fields of plugins.
        supported: fields of the endpoint.
    """
    return [
        name
        for name, value in data.items()
        if name in _OFF and name not in declared and name not in supported and not _is_off(value, _OFF[name])
    ]


def refuse(path: str) -> UnsupportedParameter:
    """The refusal of one field."""
    return UnsupportedParameter(f"{path}: this server does not support this parameter yet.", path)


def is_known(name: str) -> bool:
    """Whether a field is known, so that it is not listed as ignored."""
    return name in _OFF


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in off)
