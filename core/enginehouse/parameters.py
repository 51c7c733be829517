"""The request fields that say how to draw and when to stop: names, ranges, defaults, effective values.

The API's request bodies are built on :class:`ParameterFields`, and so are the ``defaults`` of a model in
the configuration, so both accept the same. Effective values come from the request, else from the first layer
of defaults that has one, else from the built-in ones; where each came from is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import and_, ge, gt, le, optional
from cattrs import Converter

from enginehouse.config import LimitsSettings
from enginehouse.errors import ConfigError, InvalidRequest
from enginehouse.sampler import SamplerPlugin
from enginehouse.structuring import closest, find_problems, strict_converter
from enginehouse.types import GenerateRequest, SamplingParams, StopParams

__all__ = [
    "INT64_MAX",
    "Defaults",
    "Layer",
    "Origin",
    "ParameterFields",
    "Parameters",
    "StopField",
    "effective_parameters",
    "int64",
    "read_defaults",
    "read_extensions",
    "request_converter",
]

Origin = Literal["request", "alias", "model", "generation_config", "profile", "limits", "built-in", "drawn"]
"""Where an effective value comes from, the strongest first. ``alias`` and ``model`` are the configuration's defaults,
``generation_config`` is what the model's own files say, ``profile`` is the API that the client speaks, ``limits`` the
server's limit, and ``drawn`` the seed of a request that gave none."""

INT64_MAX = 2**63 - 1

int64 = and_(ge(-INT64_MAX - 1), le(INT64_MAX))
"""Validator of whole numbers that cross the worker link."""

StopField = str | tuple[str, ...] | None
_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_STOPPING_NAMES = frozenset(StopParams.__struct_fields__)


def _check_logit_bias(_: Any, attribute: Any, value: dict[str, float] | None) -> None:
    wrong = [key for key, bias in (value or {}).items() if not -100 <= bias <= 100]
    if wrong:
        named = ", ".join(map(repr, wrong[:20]))
        raise ValueError(f"'{attribute.name}' values must be from -100 to 100; wrong for {named}")


def _check_stop(_: Any, attribute: Any, value: StopField) -> None:
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise ValueError(f"'{attribute.name}' must not hold an empty string")


@frozen(kw_only=True)
class ParameterFields:
    """Request fields that every way of generating text takes. None is "not given".

    Attributes:
        temperature: 0 to 2; 0 is greedy.
        top_p: above 0, at most 1.
        top_k: -1 and 0 are off.
        min_p: 0 to 1; 0 is off.
        repetition_penalty: above 0; 1 is off.
        logit_bias: token id (as JSON key) to a value from -100 to 100.
        stop: one or several strings before which the text ends.
        max_tokens: at least 1.
    """

    temperature: float | None = field(default=None, validator=optional([ge(0), le(2)]))
    top_p: float | None = field(default=None, validator=optional([gt(0), le(1)]))
    top_k: int | None = field(default=None, validator=optional([ge(-1), le(2**31 - 1)]))
    min_p: float | None = field(default=None, validator=optional([ge(0), le(1)]))
    repetition_penalty: float | None = field(default=None, validator=optional([gt(0), le(1000)]))
    presence_penalty: float | None = field(default=None, validator=optional([ge(-2), le(2)]))
    frequency_penalty: float | None = field(default=None, validator=optional([ge(-2), le(2)]))
    logit_bias: dict[str, float] | None = field(default=None, validator=_check_logit_bias)
    seed: int | None = field(default=None, validator=optional(int64))
    stop: str | tuple[str, ...] | None = field(default=None, validator=_check_stop)
    max_tokens: int | None = field(default=None, validator=optional([ge(1), le(INT64_MAX)]))
    ignore_eos: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The given fields of :class:`SamplingParams`; ``logit_bias`` still with the keys that the client wrote."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        if self.top_k == -1:
            given["top_k"] = 0
        return {name: value for name, value in given.items() if value is not None}

    def stopping(self) -> dict[str, Any]:
        """The given fields of :class:`StopParams`."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        given = {"max_tokens": self.max_tokens, "stop": stop, "ignore_eos": self.ignore_eos}
        return {name: value for name, value in given.items() if value is not None}


_SAMPLING_FIELDS = tuple(a.name for a in attrs.fields(ParameterFields) if a.name in _SAMPLING_NAMES)


@frozen(kw_only=True)
class Parameters:
    """Effective values, and for each field of both structs where its value comes from."""

    sampling: SamplingParams
    stopping: StopParams
    origins: Mapping[str, Origin]


def request_converter() -> Converter:
    """A strict converter for request fields: unknown keys are left to the caller."""
    converter = strict_converter(forbid_extra_keys=False)
    strings = converter.get_structure_hook(tuple[str, ...])

    def structure_stop(value: Any, _: Any) -> Any:
        if not isinstance(value, str | list):
            raise TypeError("must be a string or a list of strings")
        return value if isinstance(value, str) else strings(value, tuple[str, ...])

    converter.register_structure_hook_func(lambda kind: kind == StopField, structure_stop)
    return converter


def read_extensions(
    converter: Converter, data: Mapping[str, Any], samplers: Mapping[str, SamplerPlugin]
) -> dict[str, dict[str, Any]]:
    """The fields in ``data`` that sampler plugins declared, checked by their own classes, by plugin name.

    Raises:
        Exception: whatever the converter raises; :func:`enginehouse.structuring.find_problems` explains it.
    """
    extensions: dict[str, dict[str, Any]] = {}
    for name, sampler in samplers.items():
        declared = {attribute.name for attribute in attrs.fields(sampler.request_fields)}
        if given := {key: data[key] for key in declared & data.keys()}:
            fields = converter.structure(given, sampler.request_fields)
            extensions[name] = {key: getattr(fields, key) for key in given}
    return extensions


@frozen
class Defaults:
    """Default parameters, in the form of a request's."""

    sampling: dict[str, Any] = field(factory=dict)
    stopping: dict[str, Any] = field(factory=dict)
    extensions: dict[str, dict[str, Any]] = field(factory=dict)


@frozen
class Layer:
    """Defaults and where they come from; in a list of layers the earlier ones win."""

    origin: Origin
    defaults: Defaults


def read_defaults(data: Mapping[str, Any], path: str, samplers: Mapping[str, SamplerPlugin]) -> Defaults:
    """Read a table of defaults of the configuration; ``path`` is its place there.

    Raises:
        ConfigError: a name is no request field, or its value is wrong.
    """
    plugin_fields = {a.name for sampler in samplers.values() for a in attrs.fields(sampler.request_fields)}
    known = (*(attribute.name for attribute in attrs.fields(ParameterFields)), *sorted(plugin_fields))
    for name in data:
        if name not in known:
            raise ConfigError(f"{path}.{name}: no such request field{closest(name, known)}", f"{path}.{name}")
    converter = request_converter()
    try:
        fields = converter.structure(data, ParameterFields)
        extensions = read_extensions(converter, data, samplers)
    except Exception as error:
        problems = list(find_problems(error, path))
        raise ConfigError("; ".join(map(str, problems)), problems[0].path) from error
    return Defaults(fields.sampling(), fields.stopping(), extensions)


def effective_parameters(
    request: GenerateRequest, layers: Sequence[Layer], vocab_size: int, limits: LimitsSettings
) -> Parameters:
    """What applies to a request.

    Args:
        request: its fields come before those of every layer.
        layers: defaults, the strongest first.
        vocab_size: of the model.
        limits: a request may not ask for more tokens than they allow; defaults that do are cut.

    Raises:
        InvalidRequest: a key of ``logit_bias`` is no token id of this model, or ``max_tokens`` is over the limit.
    """
    given = Defaults(request.sampling, request.stopping, request.extensions)
    origins: dict[str, Origin] = dict.fromkeys((*_SAMPLING_NAMES - {"extensions"}, *_STOPPING_NAMES), "built-in")
    sampling: dict[str, Any] = {}
    stopping: dict[str, Any] = {}
    extensions: dict[str, dict[str, Any]] = {}
    for layer in (*reversed(layers), Layer("request", given)):
        defaults = layer.defaults
        sampling |= defaults.sampling
        stopping |= defaults.stopping
        origins |= dict.fromkeys((*defaults.sampling, *defaults.stopping), layer.origin)
        for plugin, fields in defaults.extensions.items():
            extensions[plugin] = {**extensions.get(plugin, {}), **fields}
            origins |= dict.fromkeys(fields, layer.origin)
    if "seed" not in sampling:
        # A seed is always set, so that the sequence can be replayed.
        sampling["seed"], origins["seed"] = secrets.randbits(63), "drawn"
    if bias := sampling.get("logit_bias"):
        sampling["logit_bias"] = _token_ids(bias, vocab_size)
    limit, asked = limits.max_tokens, stopping.get("max_tokens")
    if limit is not None and (asked is None or asked > limit):
        if origins["max_tokens"] == "request":
            raise InvalidRequest(f"max_tokens: this server allows at most {limit}, not {asked}", "max_tokens")
        stopping["max_tokens"], origins["max_tokens"] = limit, "limits"
    return Parameters(
        sampling=SamplingParams(**sampling, extensions=extensions), stopping=StopParams(**stopping), origins=origins
    )


def _token_ids(bias: Mapping[Any, float], vocab_size: int) -> dict[int, float]:
    """``bias`` by token id; every key that is none is named at once."""
    ids = {key: int(key) for key in bias if str(key).isdecimal() and str(key).isascii() and len(str(key)) < 19}
    wrong = [key for key in bias if not 0 <= ids.get(key, -1) < vocab_size]
    if wrong:
        named = ", ".join(repr(key) for key in wrong[:20]) + (", ..." if len(wrong) > 20 else "")
        raise InvalidRequest(
            f"logit_bias: keys must be token ids of this model, 0 to {vocab_size - 1}; wrong: {named}", "logit_bias"
        )
    if len(set(ids.values())) == vocab_size and max(bias.values()) <= -100:
        raise InvalidRequest("logit_bias: bans every token of this model", "logit_bias")
    return {ids[key]: float(value) for key, value in bias.items()}
