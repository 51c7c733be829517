"""Which steps draw a request's tokens, and in which order: the field ``samplers``, and steps that replace others.

Used for effective parameters: what does not run is set to "off" there, so that effective values tell the truth and the
engine only needs the order. What a request asks for itself is never dropped: it runs, or the request is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.sampler import CORE_ORDER, SamplerPlugin, role_of
from enginehouse.contract.types import GenerateRequest
from enginehouse.settings.structuring import closest

__all__ = ["OFF_VALUES", "StepChoice", "settle_steps", "step_names"]

OFF_VALUES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        "temperature": {"temperature": 1.0},
        "top_k": {"top_k": 0},
        "top_p": {"top_p": 1.0},
        "min_p": {"min_p": 0.0},
    }
)
"""Core's steps, with the fields that control them and the values that turn them off."""


def step_names(names: Sequence[str], samplers: Mapping[str, SamplerPlugin]) -> tuple[str, ...]:
    """The names of ``samplers`` as the steps themselves write them.

    Raises:
        InvalidRequest: a name is unknown or stands there twice.
    """
    known = {name: name for name in CORE_ORDER}
    for plugin in samplers.values():
        if role_of(plugin) not in ("temperature", "processor"):  # the former stand where "temperature" stands
            known |= dict.fromkeys((plugin.name, *getattr(plugin, "aliases", ())), plugin.name)
    for name in names:
        if name not in known:
            all_names = ", ".join(sorted(set(known.values())))
            message = f"samplers: no such step: {name[:100]!r}{closest(name, known)}; there are {all_names}"
            raise InvalidRequest(message, "samplers")
    found = tuple(known[name] for name in names)
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"samplers: lists {twice!r} twice", "samplers")
    return found


@frozen
class StepChoice:
    """What was settled.

    Attributes:
        order: names of the steps, in order; None is the steps' own order.
        dropped: steps that must not run, with the field because of which they do not.
    """

    order: tuple[str, ...] | None = None
    dropped: Mapping[str, str] = MappingProxyType({})


def settle_steps(
    request: GenerateRequest,
    sampling: Mapping[str, Any],
    extensions: Mapping[str, Mapping[str, Any]],
    samplers: Mapping[str, SamplerPlugin],
) -> StepChoice:
    """Which steps run.

    Args:
        request: what it gives itself is never dropped.
        sampling: the request's fields over all defaults.
        extensions: the same for plugins.
        samplers: the plugins, by name.

    Raises:
        InvalidRequest: ``samplers`` is wrong, or the request asks for a step and for its absence.
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
    """The steps that these values turn on, each with a field that does."""
    on: dict[str, str] = {}
    for name, off in OFF_VALUES.items():
        changed = [field for field, value in off.items() if sampling.get(field, value) != value]
        if changed:
            on[name] = changed[0]
    for name, fields in extensions.items():
        plugin = samplers[name]
        if role_of(plugin) == "processor":
            continue  # no step among the others: it always runs
        if plugin.create(plugin.request_fields(**fields)) is not None:
            on[name] = next(iter(fields))
    return on


def _with_asked(
    order: tuple[str, ...], asked: Mapping[str, str], samplers: Mapping[str, SamplerPlugin], *, is_own: bool
) -> tuple[str, ...]:
    """``order`` with the steps that a request asks for: its own list must have them, to a default they are added."""
    roles = {name: role_of(plugin) for name, plugin in samplers.items()}
    places = {**CORE_ORDER, **{name: plugin.order for name, plugin in samplers.items()}}
    for name, field in asked.items():
        place = _place(name, roles)
        if place in order:
            continue
        if is_own:
            raise InvalidRequest(f"samplers: does not list {place!r}, which {field} asks for", "samplers")
        before = sum(places[other] < places[place] for other in order)
        order = (*order[:before], place, *order[before:])
    return order


def _replaced(replacement: str, others: list[str], asked: Mapping[str, str], on: Mapping[str, str]) -> dict[str, str]:
    """What does not run because of ``replacement``; unless the request asks for others, and a default for it."""
    wanted = [name for name in others if name in asked]
    if not wanted:
        return dict.fromkeys(others, on[replacement])
    if replacement in asked:
        field = asked[wanted[0]]
        raise InvalidRequest(f"{field}: not together with {asked[replacement]}, which replaces it", field)
    return {replacement: asked[wanted[0]]}


def _place(name: str, roles: Mapping[str, str]) -> str:
    """What a step is called in an order."""
    return "temperature" if roles.get(name) == "temperature" else name


def _truncates(name: str, roles: Mapping[str, str]) -> bool:
    return roles.get(name, "truncation") in ("truncation", "replacement") and name not in ("penalties", "temperature")
