"""Request fields that some or all endpoints refuse, with the reason, and the names that plugins cannot use.

A field of one generating endpoint is refused by the others; further fields are known from other servers' APIs, so that
they are refused by name instead of being ignored. A field is accepted if its value has no effect (``"tools": []``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from attrs import frozen

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.fields import FIELDS, ChatFields, CompletionFields
from enginehouse.contract.rows import row_of

__all__ = ["NAMES", "REFUSED", "Refusal", "refuse", "refused_fields"]


@frozen
class Refusal:
    """A known field that an endpoint does not have.

    Attributes:
        reason: shown to the client.
        off: values without effect, which are accepted.
        is_reserved: plugins cannot declare a field of this name.
        plugin: the first-party plugin that takes the field; "" if none does.
    """

    reason: str
    off: tuple[Any, ...] = ()
    is_reserved: bool = True
    plugin: str = ""

    def is_off(self, value: Any) -> bool:
        """Return True if the value has no effect."""
        if isinstance(value, dict):
            value = {key: item for key, item in value.items() if item is not None}
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.off)


_NO_COMPRESSION = "the plugin 'compress' is not loaded"
_NO_STEP = "no loaded plugin takes this parameter; Enginehouse's own sampling steps are in the plugin 'samplers'"
_PLUGINS = {_NO_COMPRESSION: "compress", _NO_STEP: "samplers"}

# Reason, whether the names are reserved, and field name to the values without effect.
_REFUSED_EVERYWHERE: tuple[tuple[str, bool, dict[str, tuple[Any, ...]]], ...] = (
    (
        "tools and tool_choice have replaced this parameter",
        True,
        {"functions": ([],), "function_call": ("none", "auto")},
    ),
    ("use enable_thinking, reasoning_effort or thinking_budget", True, {"reasoning": ({},), "thinking": ()}),
    ("web search is not supported", True, {"web_search_options": (), "documents": ([],)}),
    ("moderation is not supported", True, {"moderation": ()}),
    ("only text is supported", True, {"modalities": (["text"],), "audio": (), "input": ()}),
    (
        "chat templates are set by the server: the model's own, or the file in its settings",
        True,
        {"chat_template": ()},
    ),
    ("reasoning is always returned separately from the answer", True, {"include_reasoning": ()}),
    ("verbosity is not supported", True, {"verbosity": ("medium",)}),
    (
        "control tokens are never shown",
        True,
        {
            "skip_special_tokens": (True,),
            "spaces_between_special_tokens": (True,),
        },
    ),
    ("use logit_bias, stop or a constraint", False, {"bad_words": ([],), "allowed_token_ids": ()}),
    ("code of clients is not supported", True, {"logits_processors": ([],)}),
    (_NO_COMPRESSION, False, {"compression": (False,)}),
    (
        "beam search is not supported",
        False,
        {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)},
    ),
    (
        _NO_STEP,
        False,
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


def _refusals() -> Iterator[tuple[str, Refusal]]:
    chats, completions = (
        {attribute.name: row_of(attribute).off for attribute in attrs.fields(table)}
        for table in (ChatFields, CompletionFields)
    )
    for name, off in chats.items():
        if name not in completions:
            yield name, Refusal("only chats take this parameter", off)
    for name, off in completions.items():
        if name not in chats or name == "prompt":  # the tokens of /detokenize are not a prompt
            yield name, Refusal("only /v1/completions takes this parameter", off)
    for reason, is_reserved, fields in _REFUSED_EVERYWHERE:
        for name, off in fields.items():
            yield name, Refusal(reason, off, is_reserved, _PLUGINS.get(reason, ""))


REFUSED: Mapping[str, Refusal] = MappingProxyType(dict(_refusals()))
"""Known fields that some or all endpoints refuse, by name."""

NAMES = frozenset((*FIELDS, *(name for name, refusal in REFUSED.items() if refusal.is_reserved)))
"""Names that plugins cannot give to their fields."""


def refuse(path: str, absences: Mapping[str, str] = MappingProxyType({})) -> UnsupportedParameter:
    """Return the refusal of a field or a part of one.

    Args:
        absences: why installed plugins do not work, by name; said of the plugin that takes the field.
    """
    known = REFUSED.get(path)
    reason = known.reason if known is not None else "this server does not support this parameter yet"
    reason = absences.get(known.plugin if known is not None else path, reason)
    return UnsupportedParameter(f"{path}: {reason}", path)


def refused_fields(honoured: Collection[str]) -> dict[str, str]:
    """Return the known fields other than ``honoured``, each with the reason for its refusal."""
    return {name: refusal.reason for name, refusal in REFUSED.items() if name not in honoured}
