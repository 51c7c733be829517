"""Reasoning on the wire -> :class:`enginehouse.contract.types.Thinking` and variables of the chat template.

Several servers have several names for the same: ``enable_thinking``, ``reasoning_effort``, ``thinking_budget``,
and the template variables ``enable_thinking`` and ``thinking`` in ``chat_template_kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Thinking

__all__ = ["Effort", "check_template_variables", "read_thinking"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_MAX_JSON_BYTES = 32 * 1024
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "eos_token",
        "messages",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "tools",
        "unk_token",
    }
)


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Check the field ``chat_template_kwargs``.

    Raises:
        InvalidRequest: a name is reserved or can be no variable, or there is too much.
    """
    for name in variables:
        path = f"chat_template_kwargs.{name[:100]}"
        if name in _RESERVED:
            raise InvalidRequest(f"{path}: this variable is reserved", path)
        if not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(f"{path}: is no name of a template variable", path)
    try:
        num_bytes = len(msgspec.json.encode(variables))
    except UnicodeEncodeError:
        raise InvalidRequest("chat_template_kwargs: holds a lone surrogate", "chat_template_kwargs") from None
    if num_bytes > _MAX_JSON_BYTES:
        message = f"must have at most {_MAX_JSON_BYTES} bytes, not {num_bytes}"
        raise InvalidRequest(f"chat_template_kwargs: {message}", "chat_template_kwargs")


def read_thinking(
    enabled: bool | None, effort: Effort | None, budget: int | None, variables: Mapping[str, Any]
) -> Thinking:
    """What a request says about reasoning.

    Args:
        budget: -1 is no limit.

    Raises:
        InvalidRequest: one name says yes and another one no.
    """
    said: dict[str, bool] = {} if enabled is None else {"enable_thinking": enabled}
    for name in _SWITCHES:
        if isinstance(value := variables.get(name), bool):
            said[f"chat_template_kwargs.{name}"] = value
    if effort == "none":
        said["reasoning_effort"], effort = False, None
    first = next(iter(said), None)
    none_left = {"thinking_budget": False} if budget == 0 else {}
    for name, value in {**said, **none_left}.items():
        if first is not None and value != said[first]:
            raise InvalidRequest(f"{name}: contradicts {first}; give one of them", name)
    enabled = None if first is None else said[first]
    return Thinking(enabled=enabled, budget=None if budget == -1 else budget, effort=effort)
