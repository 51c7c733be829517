"""Effective parameters on the wire: each value, and where it comes from. For models and for answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from enginehouse.api.openai.decoding import Decoded, GenerationBody
from enginehouse.contract.request_fields import RequestField
from enginehouse.pipeline.parameters import Origin, Parameters

__all__ = ["shown_fields", "shown_parameters"]

_CONTENT = frozenset({"messages", "prompt", "suffix", "prediction", "tools", "model"})
"""Fields that are no parameters but what is asked."""


def shown_parameters(parameters: Parameters, plugin_fields: Iterable[RequestField]) -> dict[str, dict[str, Any]]:
    """Name to ``value`` and ``origin`` of everything that draws and stops; plugins' fields with what they mean by off.

    Without a limit ``max_tokens`` is null: the rest of the context.
    """
    sampling, stopping, origins = parameters.sampling, parameters.stopping, parameters.origins
    shown = {
        name: _shown(getattr(group, name), name, origins)
        for group in (sampling, stopping)
        for name in group.__struct_fields__
        if name not in ("extensions", "num_logprobs")
    }
    for field in plugin_fields:
        value = sampling.extensions.get(field.sampler, {}).get(field.name, _default(field))
        shown[field.name] = _shown(value, field.name, origins)
    return shown


def shown_fields(decoded: Decoded[GenerationBody]) -> dict[str, dict[str, Any]]:
    """The other fields of a body, but for those that have neither a value nor a default.

    Structures and longer texts are the client's own: only their origin is shown.
    """
    shown: dict[str, dict[str, Any]] = {}
    for attribute in attrs.fields(type(decoded.body)):
        name, value = attribute.name, getattr(decoded.body, attribute.name)
        given = name in decoded.given
        if name in _CONTENT or (value is None and not given):
            continue
        entry: dict[str, Any] = {"origin": "request" if given else "built-in"}
        if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 64):
            entry = {"value": value, **entry}
        if given or "value" in entry:
            shown[name] = entry
    return shown


def _default(field: RequestField) -> Any:
    """What applies when nobody says anything; None where it depends on other fields."""
    default: Any = field.attribute.default
    if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a function in attrs' types
        return default
    return None if default.takes_self else default.factory()


def _shown(value: Any, name: str, origins: Mapping[str, Origin]) -> dict[str, Any]:
    return {"value": value, "origin": origins.get(name, "built-in")}
