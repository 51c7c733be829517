"""Known but unsupported request fields: refused by name and with the reason, never silently dropped.

A field is accepted if its value has no effect (``"tools": []``). Fields declared by an installed plugin are not checked
here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from enginehouse.contract.errors import UnsupportedParameter

__all__ = ["find_unsupported", "is_known", "refuse", "refused_fields"]

_NOT_YET = "this server does not support this parameter yet"

# Reason, and field name to the values without effect.
_GROUPS: tuple[tuple[str, dict[str, tuple[Any, ...]]], ...] = (
    (
        "only chats take this parameter",
        {
            "messages": (),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (True, False),
            "reasoning_effort": (),
            "thinking_budget": (),
            "enable_thinking": (),
            "chat_template_kwargs": ({},),
            "prediction": (),
            "max_completion_tokens": (),
            "top_logprobs": (0,),
        },
    ),
    (
        "only /v1/completions takes this parameter",
        {"prompt": (), "best_of": (1,), "echo": (False,), "suffix": ("",)},
    ),
    (
        "tools and tool_choice have replaced this parameter",
        {"functions": ([],), "function_call": ("none", "auto")},
    ),
    ("use enable_thinking, reasoning_effort or thinking_budget", {"reasoning": ({},), "thinking": ()}),
    ("this server searches nothing", {"web_search_options": (), "documents": ([],)}),
    ("this server judges no texts", {"moderation": ()}),
    ("models of this server read and write text only", {"modalities": (["text"],), "audio": (), "input": ()}),
    ("this server loads no adapters yet", {"peft": ({},), "lora": ([],)}),
    (
        "the template is the server's: a model's own, or the one that its settings name",
        {"chat_template": (), "add_generation_prompt": (True,), "continue_final_message": ()},
    ),
    ("a model that reasons always does it apart from its answer", {"include_reasoning": ()}),
    ("models of this server know no verbosity", {"verbosity": ("medium",)}),
    (
        "control tokens and stop strings are never shown",
        {
            "include_stop_str_in_output": (False,),
            "skip_special_tokens": (True,),
            "spaces_between_special_tokens": (True,),
        },
    ),
    ("use logit_bias, stop or a constraint", {"bad_words": ([],), "allowed_token_ids": ()}),
    ("no code of clients runs here", {"logits_processors": ([],)}),
    ("the plugin 'compress' is not loaded", {"compression": (False,)}),
    (
        "there is no beam search",
        {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)},
    ),
    (
        "no installed sampler plugin takes this parameter; Enginehouse's own are in enginehouse_samplers",
        {
            "top_a": (0,),
            "tfs_z": (1,),
            "xtc_probability": (0,),
            "xtc_threshold": (),
            "typical_p": (1,),
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
        },
    ),
)

_OFF = {name: off for _, fields in _GROUPS for name, off in fields.items()}
_REASONS = {name: reason for reason, fields in _GROUPS for name in fields}


def find_unsupported(data: Mapping[str, Any], declared: Collection[str], supported: Collection[str]) -> list[str]:
    """Return names in ``data`` that request something unsupported.

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
    """Return the refusal of a field or a part of one."""
    return UnsupportedParameter(f"{path}: {_REASONS.get(path, _NOT_YET)}", path)


def refused_fields(honoured: Collection[str]) -> dict[str, str]:
    """Return the known fields other than ``honoured``, each with the reason for its refusal."""
    return {name: reason for name, reason in _REASONS.items() if name not in honoured}


def is_known(name: str) -> bool:
    """Return True if a field is known, so that it is not listed as ignored."""
    return name in _OFF


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in off)
