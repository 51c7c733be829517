"""Effective parameters: the request's own over alias, model, profile and built-in defaults, each with its origin."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import attrs
from attrs import field, frozen
from cattrs import Converter

from enginehouse.contract.errors import ConfigError, InvalidRequest, quoted
from enginehouse.contract.fields import FIELDS, ParameterFields, StopField
from enginehouse.contract.rows import details_class
from enginehouse.contract.sampler import CORE_ORDER, SamplerPlugin, role_of
from enginehouse.contract.types import GenerateRequest, SamplingParams, StopParams
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.structuring import closest, converting, find_wide_integer, strict_converter

OFF_VALUES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        step: {name: getattr(SamplingParams(), name) for name, row in FIELDS.items() if row.step == step}
        for step in CORE_ORDER
    }
)
"""Core's sampling steps, with the fields that control them and the values that turn them off."""


def step_names(names: Sequence[str], samplers: Mapping[str, SamplerPlugin]) -> tuple[str, ...]:
    """Return the entries of ``samplers`` under the names that the steps use.

    Raises:
        InvalidRequest: a name is unknown or occurs twice.
    """
    known = {name: name for name in CORE_ORDER}
    for plugin in samplers.values():
        if role_of(plugin) not in ("temperature", "processor"):  # the former take the position of "temperature"
            known |= dict.fromkeys((plugin.name, *getattr(plugin, "aliases", ())), plugin.name)
    for name in names:
        if name not in known:
            all_names = ", ".join(sorted(set(known.values())))
            message = f"samplers: no such step: {quoted(name)}{closest(name, known)}; there are {all_names}"
            raise InvalidRequest(message, "samplers")
    found = tuple(known[name] for name in names)
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"samplers: lists {twice!r} twice", "samplers")
    return found


@frozen
class StepChoice:
    """The sampling steps of a request.

    Attributes:
        order: names of the steps, in order; None for the default order.
        dropped: steps that must not run, each with the field that excludes it.
    """

    order: tuple[str, ...] | None = None
    dropped: Mapping[str, str] = MappingProxyType({})


def settle_steps(
    request: GenerateRequest,
    sampling: Mapping[str, Any],
    extensions: Mapping[str, Mapping[str, Any]],
    samplers: Mapping[str, SamplerPlugin],
) -> StepChoice:
    """Decide which sampling steps run.

    Args:
        request: fields that it gives itself are never dropped.
        sampling: the request's fields over all defaults.
        extensions: the same for plugins.
        samplers: the plugins, by name.

    Raises:
        InvalidRequest: ``samplers`` is wrong, or the request both enables and excludes a step.
    """
    listed = sampling.get("samplers")
    if listed is None and not extensions:
        return StepChoice()
    roles = {name: role_of(plugin) for name, plugin in samplers.items()}
    if listed is None and not any(roles.get(name) == "replacement" for name in extensions):
        return StepChoice()
    asked = _steps_on(request.sampling, request.extensions, samplers)
    on = _steps_on(sampling, extensions, samplers)
    order, dropped = None, dict[str, str]()
    if listed is not None:
        order = _with_asked(step_names(listed, samplers), asked, samplers, is_own="samplers" in request.sampling)
        dropped |= {name: "samplers" for name in on if _place(name, roles) not in order}
    running = [name for name in on if name not in dropped]
    for name in running:
        if roles.get(name) == "replacement":
            others = [other for other in running if other != name and _truncates(other, roles)]
            dropped |= _replaced(name, others, asked, on)
    return StepChoice(order, dropped)


def _steps_on(
    sampling: Mapping[str, Any], extensions: Mapping[str, Mapping[str, Any]], samplers: Mapping[str, SamplerPlugin]
) -> dict[str, str]:
    """Return the steps that these values turn on, each with a field that does so."""
    on: dict[str, str] = {}
    for name, off in OFF_VALUES.items():
        changed = [wire_name for wire_name, value in off.items() if sampling.get(wire_name, value) != value]
        if changed:
            on[name] = changed[0]
    for name, fields in extensions.items():
        plugin = samplers[name]
        if role_of(plugin) == "processor":
            continue  # not a step in the chain: it always runs
        if plugin.create(plugin.request_fields(**fields)) is not None:
            on[name] = next(iter(fields))
    return on


def _with_asked(
    order: tuple[str, ...], asked: Mapping[str, str], samplers: Mapping[str, SamplerPlugin], *, is_own: bool
) -> tuple[str, ...]:
    """Return ``order`` with the requested steps: a request's own list must contain them, a default list is extended."""
    roles = {name: role_of(plugin) for name, plugin in samplers.items()}
    places = {**CORE_ORDER, **{name: plugin.order for name, plugin in samplers.items()}}
    for name, wire_name in asked.items():
        place = _place(name, roles)
        if place in order:
            continue
        if is_own:
            raise InvalidRequest(f"samplers: does not list {place!r}, which {wire_name} asks for", "samplers")
        before = sum(places[other] < places[place] for other in order)
        order = (*order[:before], place, *order[before:])
    return order


def _replaced(replacement: str, others: list[str], asked: Mapping[str, str], on: Mapping[str, str]) -> dict[str, str]:
    """Return the steps to drop: the others, or ``replacement`` itself if it is a default and others are requested."""
    wanted = [name for name in others if name in asked]
    if not wanted:
        return dict.fromkeys(others, on[replacement])
    if replacement in asked:
        wire_name = asked[wanted[0]]
        raise InvalidRequest(f"{wire_name}: not together with {asked[replacement]}, which replaces it", wire_name)
    return {replacement: asked[wanted[0]]}


def _place(name: str, roles: Mapping[str, str]) -> str:
    """Return the name of a step in an order."""
    return "temperature" if roles.get(name) == "temperature" else name


def _truncates(name: str, roles: Mapping[str, str]) -> bool:
    replaced = ("truncation", "replacement", "weights")
    return roles.get(name, "truncation") in replaced and name not in ("penalties", "temperature")


Origin = Literal["request", "alias", "model", "generation_config", "profile", "limits", "built-in", "drawn"]
"""Sources of an effective value, highest priority first. ``alias`` and ``model`` are the configuration's defaults,
``generation_config`` is from the model's own files, ``profile`` is the API that the client speaks, ``limits`` the
server's limit, and ``drawn`` the random seed of a request without one.
"""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")
_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_STOPPING_NAMES = frozenset(StopParams.__struct_fields__)


@frozen(kw_only=True)
class Parameters:
    """Effective values, and the origin of each field of both structs."""

    sampling: SamplingParams
    stopping: StopParams
    origins: Mapping[str, Origin]


@functools.cache
def request_converter() -> Converter:
    """Return the strict converter for request fields; the caller handles unknown keys."""
    converter = strict_converter(forbid_extra_keys=False, whole_floats=True)
    strings = converter.get_structure_hook(tuple[str, ...])

    def structure_stop(value: Any, _: Any) -> Any:
        if not isinstance(value, str | list):
            raise TypeError("must be a string or a list of strings")
        return value if isinstance(value, str) else strings(value, tuple[str, ...])

    def structure_switch(value: Any, kind: Any) -> Any:
        if not isinstance(value, bool | dict):
            raise TypeError("must be true, false or an object")
        details: Any = details_class(kind)
        return value if isinstance(value, bool) else converter.structure(value, details)

    converter.register_structure_hook_func(lambda kind: kind == StopField, structure_stop)
    converter.register_structure_hook_func(lambda kind: details_class(kind) is not None, structure_switch)
    return converter


def read_extensions(
    converter: Converter, data: Mapping[str, Any], declared: Mapping[str, type[Any]]
) -> dict[str, dict[str, Any]]:
    """Read the fields in ``data`` that plugins declared, validated by the plugins' classes, by owner.

    Args:
        declared: attrs class of each owner's fields.

    Raises:
        Exception: any exception of the converter; :func:`enginehouse.settings.structuring.find_problems` explains it.
    """
    extensions: dict[str, dict[str, Any]] = {}
    fields_class: Any
    for name, fields_class in declared.items():
        if given := {key: data[key] for key in _names_of(fields_class) if key in data}:
            fields = converter.structure(given, fields_class)
            extensions[name] = {key: _plain(getattr(fields, key)) for key in given}
            if (wide := find_wide_integer(extensions[name], "")) is not None:
                raise ValueError(f"'{wide[0]}' must fit into 64 bits, which {wide[1]} does not")
    return extensions


@functools.cache
def _names_of(fields_class: Any) -> tuple[str, ...]:
    return tuple(attribute.name for attribute in attrs.fields(fields_class))


def _plain(value: Any) -> Any:
    """Return a JSON value: the fields are parsed again in the worker."""
    return list(value) if isinstance(value, tuple) else value


@frozen
class Defaults:
    """Default parameters, in the form of a request's."""

    sampling: dict[str, Any] = field(factory=dict)
    stopping: dict[str, Any] = field(factory=dict)
    extensions: dict[str, dict[str, Any]] = field(factory=dict)


@frozen
class Layer:
    """Defaults and their origin; in a list of layers the earlier ones win."""

    origin: Origin
    defaults: Defaults


def read_defaults(
    data: Mapping[str, Any],
    path: str,
    samplers: Mapping[str, SamplerPlugin],
    absences: Mapping[str, str] = MappingProxyType({}),
) -> Defaults:
    """Read a table of defaults of the configuration; ``path`` is its location there.

    Args:
        absences: why installed plugins do not work, by name; said of a field of that name.

    Raises:
        ConfigError: a name is not a request field, or its value is wrong.
    """
    declared = {name: sampler.request_fields for name, sampler in samplers.items()}
    classes: list[type[Any]] = [ParameterFields, *declared.values()]
    known = tuple(attribute.name for fields_class in classes for attribute in attrs.fields(fields_class))
    for name in data:
        if name not in known:
            hint = f": {absences[name]}" if name in absences else closest(name, known)
            raise ConfigError(f"{path}.{name}: no such request field{hint}", f"{path}.{name}")
    converter = request_converter()
    with converting(lambda problems: ConfigError("; ".join(map(str, problems)), problems[0].path), path):
        fields = converter.structure(data, ParameterFields)
        extensions = read_extensions(converter, data, declared)
    wrong = [key for key in fields.logit_bias or () if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        problem = f"keys must be token ids; wrong: {', '.join(map(quoted, wrong[:20]))}"
        raise ConfigError(f"{path}.logit_bias: {problem}", f"{path}.logit_bias")
    try:
        step_names(fields.samplers or (), samplers)
    except InvalidRequest as error:
        raise ConfigError(f"{path}.{error.message}", f"{path}.samplers") from error
    return Defaults(fields.sampling(), fields.stopping(), extensions)


def effective_parameters(
    request: GenerateRequest,
    layers: Sequence[Layer],
    vocab_size: int,
    limits: LimitsSettings,
    samplers: Mapping[str, SamplerPlugin] = MappingProxyType({}),
) -> Parameters:
    """Return the parameters that apply to a request.

    Args:
        request: its fields override those of every layer.
        layers: defaults, highest priority first.
        vocab_size: of the model.
        limits: a request that exceeds the token limit is refused; defaults that exceed it are reduced to it.
        samplers: the sampler plugins, by name.

    Raises:
        InvalidRequest: a key of ``logit_bias`` is not a token id of this model, ``max_tokens`` is over the limit or
            below ``min_tokens``, or ``samplers`` is incompatible with the other fields.
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
    _check_min_tokens(request, stopping)
    steps = settle_steps(request, sampling, extensions, samplers)
    if steps.order is not None:
        sampling["samplers"] = steps.order
    for name, reason in steps.dropped.items():
        off = OFF_VALUES.get(name, {})
        sampling |= off
        origins |= dict.fromkeys((*off, *extensions.pop(name, {})), origins[reason])
    return Parameters(
        sampling=SamplingParams(**sampling, extensions=extensions), stopping=StopParams(**stopping), origins=origins
    )


def _check_min_tokens(request: GenerateRequest, stopping: Mapping[str, Any]) -> None:
    """Refuse a minimum over the limit if the request gives it; a default minimum has no further effect then."""
    least, most = request.stopping.get("min_tokens"), stopping.get("max_tokens")
    if least is not None and most is not None and least > most:
        raise InvalidRequest(f"min_tokens: must be at most max_tokens, which is {most}, not {least}", "min_tokens")


def _token_ids(bias: Mapping[Any, float], vocab_size: int) -> dict[int, float]:
    """Return ``bias`` by token id; one error names all invalid keys. Only one spelling of an id is valid."""
    ids = {key: int(key) for key in bias if _TOKEN_ID.fullmatch(str(key))}
    wrong = [key for key in bias if not 0 <= ids.get(key, -1) < vocab_size]
    if wrong:
        named = ", ".join(repr(key) for key in wrong[:20]) + (", ..." if len(wrong) > 20 else "")
        raise InvalidRequest(
            f"logit_bias: keys must be token ids of this model, 0 to {vocab_size - 1}; wrong: {named}", "logit_bias"
        )
    if len(set(ids.values())) == vocab_size and max(bias.values()) <= -100:
        raise InvalidRequest("logit_bias: bans every token of this model", "logit_bias")
    return {ids[key]: float(value) for key, value in bias.items()}
