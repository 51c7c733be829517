"""The response member `enginehouse`: effective values and their origins, times, routing, and savings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.generation.decoding import DecodedCall
from enginehouse.api.generation.reports import shown_reports
from enginehouse.contract.engine import Placement
from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.rows import RequestField
from enginehouse.contract.usage import USAGE_FIELDS, Usage
from enginehouse.pipeline.parameters import Origin, Parameters
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.pipeline.routing import Routed
from enginehouse.settings.profiles import Profile

_HEADER = "x-octomil-routed-model"


def routed_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """Return the header that names the model, or those of several prompts, if a router or the alias `auto` chose."""
    names = dict.fromkeys(one.model.name for one in running if one.routed is not None or one.request.model == "auto")
    return [(profile.optimization_headers.get("routed_model", _HEADER), ", ".join(names))] if names else []


def replica_headers(running: Sequence[RunningRequest]) -> list[tuple[str, str]]:
    """Return the header that names the replica that has accepted the request, or those of several prompts."""
    placements = [one.generation.placement for one in running]
    shown = [
        f"{placement.replica}; reason={placement.reason}; matched={placement.matched:.2f}"
        for placement in placements
        if placement is not None
    ]
    return [("x-enginehouse-replica", ", ".join(dict.fromkeys(shown)))] if shown else []


def shown_routed(routed: Routed | None, placement: Placement | None) -> dict[str, Any] | None:
    """Return the routing details: of a router, and of an engine with several replicas; None without both."""
    if routed is None and placement is None:
        return None
    replica = None
    if placement is not None:
        replica = {
            "name": placement.replica,
            "reason": placement.reason,
            "matched": round(placement.matched, 4),
            "tried": placement.num_tried,
        }
    return _of_router(routed) | {"replica": replica}


def _of_router(routed: Routed | None) -> dict[str, Any]:
    if routed is None:
        return {}
    return {
        "strategy": routed.strategy,
        "reason": routed.reason,
        "decision_ms": round(1000 * routed.decision_s, 3),
        "tried": [attrs.asdict(failed) for failed in routed.tried],
        "discarded_tokens": routed.num_discarded_tokens,
    }


_CONTENT = frozenset({"messages", "prompt", "suffix", "prediction", "tools", "model"})
"""Fields that are content, not parameters."""


def shown_parameters(parameters: Parameters, plugin_fields: Iterable[RequestField]) -> dict[str, dict[str, Any]]:
    """Return name to ``value`` and ``origin`` of all sampling and stopping parameters, including plugins' fields.

    Plugins' fields that are not set have their default. Without a limit, ``max_tokens`` is null: the rest of the
    context.
    """
    sampling, stopping, origins = parameters.sampling, parameters.stopping, parameters.origins
    shown = {
        name: _shown(getattr(group, name), name, origins)
        for group in (sampling, stopping)
        for name in group.__struct_fields__
        if name not in ("extensions", "num_logprobs", "post_sampling_probs")
    }
    for field in (one for one in plugin_fields if one.is_sampled):
        value = sampling.extensions.get(field.owner, {}).get(field.name, _default(field))
        shown[field.name] = _shown(value, field.name, origins)
    return shown


def shown_fields(decoded: DecodedCall[Any]) -> dict[str, dict[str, Any]]:
    """Return the other fields of a body and of plugins, except those without value and default.

    Structures and longer texts are the client's own: only their origin is shown.
    """
    shown: dict[str, dict[str, Any]] = {}
    values = {attribute.name: getattr(decoded.body, attribute.name) for attribute in attrs.fields(type(decoded.body))}
    for fields in decoded.extensions.values():
        values |= fields
    for name, value in values.items():
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
    """Return the default of a field; None if it depends on other fields."""
    default: Any = field.attribute.default
    if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a function in attrs' types
        return default
    return None if default.takes_self else default.factory()


def _shown(value: Any, name: str, origins: Mapping[str, Origin]) -> dict[str, Any]:
    return {"value": value, "origin": origins.get(name, "built-in")}


DETAILS_HEADER = b"x-enginehouse-details"
_VALUES = {b"true": True, b"1": True, b"false": False, b"0": False}


def asks_for_details(headers: Iterable[tuple[bytes, bytes]], by_default: bool) -> bool:
    """Return True if a response should include the member; the header takes precedence over the settings.

    Raises:
        InvalidRequest: the header's value is not one of true, false, 1 and 0.
    """
    value = next((value for name, value in headers if name == DETAILS_HEADER), None)
    if value is None:
        return by_default
    wanted = _VALUES.get(value.strip().lower())
    if wanted is None:
        shown = quoted(value.decode("latin-1"))
        raise InvalidRequest(f"X-Enginehouse-Details: must be true or false, not {shown}", "X-Enginehouse-Details")
    return wanted


@frozen(eq=False)
class AnswerDetails:
    """Details of one response; complete once the assembly is.

    Attributes:
        shows_kept_text: True if the caller may see text of other requests in the prefix cache.
    """

    decoded: DecodedCall[Any]
    assembly: Assembly
    plugin_fields: Mapping[str, RequestField]
    shows_kept_text: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return the member as plain data."""
        running, decoded = self.assembly.running[0], self.decoded
        left_out = [name for one in self.assembly.running for name in one.unsupported]
        return {
            "model": running.model.name,
            "routed": shown_routed(running.routed, running.generation.placement),
            "backend": running.model.info.backend,
            "parameters": self._parameters(),
            "timings_ms": self._timings_ms(),
            "tokens_per_second": self._speeds(),
            "optimizations": _optimizations(self.assembly.total()),
            "drafters": _drafters(self.assembly.total()),
            **shown_reports(self.assembly.running),
            "prefix_cache": _prefix_cache(self.assembly, self.shows_kept_text),
            "unsupported": list(dict.fromkeys((*decoded.unsupported, *left_out))),
            "ignored": list(decoded.ignored),
        }

    def _parameters(self) -> dict[str, Any]:
        """Return the effective parameters; with several prompts and no given seed, the seeds are listed."""
        running = self.assembly.running
        first = running[0]
        shown = shown_fields(self.decoded) | shown_parameters(first.parameters, self.plugin_fields.values())
        if len(running) > 1:
            shown["seed"]["value"] = [one.parameters.sampling.seed for one in running]
        room = [one.model.info.max_context - one.generation.num_prompt_tokens for one in running]
        limit = first.parameters.stopping.max_tokens
        shown["max_tokens"]["value"] = max(room) if limit is None else min(limit, max(room))
        return dict(sorted(shown.items()))

    def _timings_ms(self) -> dict[str, float]:
        """Return the time of each stage; with several prompts, the longest one."""
        total = self.assembly.total()
        stages = ("load", "render", "tokenize", "queue", "prefill", "first_token", "decode", "total")
        return {stage: round(1000 * float(getattr(total, f"{stage}_s")), 3) for stage in stages}

    def _speeds(self) -> dict[str, float | None]:
        """Return computed prompt tokens, and generated tokens after the first of each choice, per second."""
        finished, total = self.assembly.finished, self.assembly.total()
        prefill_s = sum(event.usage.prefill_s for event in finished)
        num_computed = total.prompt_tokens - total.cached_tokens
        num_decoded = total.completion_tokens - len(finished) * self.assembly.num_choices
        return {"prefill": _per_second(num_computed, prefill_s), "decode": _per_second(num_decoded, total.decode_s)}


def optimization_headers(usage: Usage, profile: Profile) -> list[tuple[str, str]]:
    """Return the profile's response headers for the optimisations that took effect in a complete response."""
    saved: dict[str, Any] = _optimizations(usage)
    if saved["drafted_tokens"]:
        saved["speculative"] = "true"
    return [(header, str(saved[name])) for name, header in profile.optimization_headers.items() if saved.get(name)]


def late_headers(usage: Usage, profile: Profile) -> dict[str, dict[str, str]]:
    """Return the member of the last chunk of a stream with these headers; nothing if there are none."""
    headers = dict(optimization_headers(usage, profile))
    return {"headers": headers} if headers else {}


def _optimizations(usage: Usage) -> dict[str, int]:
    """Return the measured savings."""
    return {name: getattr(usage, name) for name, shown in USAGE_FIELDS.items() if shown.is_optimization}


def _drafters(usage: Usage) -> dict[str, dict[str, int]]:
    """Return the drafters that have proposed tokens."""
    names = ("drafted_tokens", "accepted_draft_tokens")
    return {name: dict(zip(names, counts, strict=True)) for name, counts in usage.drafts.items()}


def _prefix_cache(assembly: Assembly, shows_kept_text: bool) -> dict[str, Any]:
    """Return disk loads, and the first difference from the cache that prevented more reuse, in any of the prompts.

    The cached sequence's token may belong to another caller, and repeated requests would reveal all of its text.
    """
    missed = next((event.cache_miss for event in assembly.finished if event.cache_miss is not None), None)
    difference: dict[str, Any] | None = None
    if missed is not None:
        difference = {"index": missed.index, "got": missed.got.decode("utf-8", "replace")}
        if shows_kept_text:
            difference["expected"] = None if missed.expected is None else missed.expected.decode("utf-8", "replace")
    return {
        "loaded_tokens": assembly.total().loaded_prompt_tokens,
        "first_difference": difference,
    }


def _per_second(num_tokens: int, seconds: float) -> float | None:
    return round(num_tokens / seconds, 2) if seconds > 0 and num_tokens > 0 else None
