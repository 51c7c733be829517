"""Support table: request parameters that a model's backend, core and the plugins can honour, with a reason for each.

Nothing is listed twice: each parameter has a rule, and the rule queries the component that decides (the engine's own
declaration, the template, the selected parsers, the active plugins). The pipeline refuses requests by this table, the
models route shows it, and docs/api.md is generated from it. Does not know any wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from attrs import frozen

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.request_fields import RequestField
from enginehouse.contract.types import ConstraintKind, GenerateRequest, ModelInfo, SamplingParams, StopParams
from enginehouse.pipeline.chat_formats import ModelFormats
from enginehouse.pipeline.prompt.infill import NO_INFILL, find_infill_tokens
from enginehouse.pipeline.request_parameters import given_parameters

__all__ = ["Capability", "Deciders", "Support", "capabilities_of", "check_parameters"]

Support = Literal["native", "emulated", "accepted", "refused"]
"""``native``: done by the model or its library. ``emulated``: done by core or a plugin, identically on every backend.
``accepted``: validated, but without effect on answers. ``refused``: a 400 that names the parameter.
"""


@frozen
class Capability:
    """Support level of one parameter, and the reason."""

    support: Support
    reason: str = ""


@frozen(kw_only=True)
class Deciders:
    """Inputs that determine a model's capabilities.

    Attributes:
        has_template: the model has a chat template; otherwise a plain fallback is used.
        plugin_fields: parameters added by sampler plugins, by name.
    """

    info: ModelInfo
    formats: ModelFormats
    has_template: bool
    plugin_fields: Mapping[str, RequestField]


_Rule = Callable[[Deciders], Capability]


def capabilities_of(deciders: Deciders) -> dict[str, Capability]:
    """Return the capability of every parameter that is not refused for all models, by name."""
    fields = {name: _by_plugin(field) for name, field in deciders.plugin_fields.items()}
    rules = sorted({**_RULES, **fields}.items())
    return {name: _said_by_engine(name, deciders) or rule(deciders) for name, rule in rules}


def check_parameters(request: GenerateRequest, capabilities: Mapping[str, Capability]) -> None:
    """Refuse a request that gives a parameter the model cannot honour.

    Raises:
        UnsupportedParameter: names the parameter and the reason.
    """
    for name in given_parameters(request):
        capability = capabilities.get(name)
        if capability is not None and capability.support == "refused":
            raise UnsupportedParameter(f"{name}: {capability.reason}", name)


# -- rules ---------------------------------------------------------------------------------------------


def _said_by_engine(name: str, deciders: Deciders) -> Capability | None:
    """Return the engine's declaration for a parameter by its wire name; None if it leaves the parameter to core."""
    engine = deciders.info.engine
    if name in engine.refused:
        return Capability("refused", engine.refused[name])
    if name in engine.native:
        return Capability("native", f"by {deciders.info.backend}")
    return None


def _by_core(_: Deciders) -> Capability:
    return Capability("emulated", "by the server, the same on every backend")


def _by_cache(deciders: Deciders) -> Capability:
    if deciders.info.engine.takes_messages:
        return Capability("accepted", "the server behind this model caches as it likes")
    return _by_core(deciders)


def _by_nobody(_: Deciders) -> Capability:
    return Capability("accepted", "for the caller's own use; no answer depends on it")


def _by_counting(_: Deciders) -> Capability:
    return Capability("accepted", "counted in usage; no answer depends on it")


def _by_engine(field: str) -> _Rule:
    """Rule for sampling, stopping and reporting: native where the engine says so, otherwise emulated by core."""

    def rule(deciders: Deciders) -> Capability:
        engine = deciders.info.engine
        if field in engine.refused:
            return Capability("refused", engine.refused[field])
        if field in engine.native:
            return Capability("native", f"by {deciders.info.backend}")
        return Capability("emulated", "by core, the same on every backend")

    return rule


def _by_plugin(field: RequestField) -> _Rule:
    def rule(deciders: Deciders) -> Capability:
        at_work = deciders.info.engine.samplers
        if at_work is not None and field.sampler not in at_work:
            return Capability("refused", f"the sampler {field.sampler!r} is not installed where this model runs")
        return Capability("emulated", f"by the plugin {field.plugin}, the same on every backend")

    return rule


def _by_template(deciders: Deciders) -> Capability:
    if deciders.has_template:
        return Capability("native", "by the model's chat template")
    return Capability("emulated", "this model has no chat template; a plain one stands in")


def _by_template_variables(deciders: Deciders) -> Capability:
    if deciders.has_template:
        return Capability("native", "by the model's chat template")
    return Capability("accepted", "this model has no chat template that could read them")


def _by_tools(deciders: Deciders) -> Capability:
    formats = deciders.formats
    if formats.tools is None:
        return Capability("refused", "no installed plugin knows how this model calls tools")
    if formats.template_takes_tools:
        return Capability("native", f"by the chat template; {formats.tool_parser!r} parses the calls")
    return Capability("emulated", f"described in the prompt; {formats.tool_parser!r} parses the calls")


def _by_tool_constraint(deciders: Deciders) -> Capability:
    tools, engine = _by_tools(deciders), deciders.info.engine
    if tools.support == "refused":
        return tools
    if "composition" not in engine.constraint_kinds:
        reason = f"'auto' and 'none' only: {engine.constraint_problem or 'its engine enforces no calls'}"
        return Capability("emulated", reason)
    return Capability("emulated", "enforced by a grammar")


def _by_constraint(*kinds: ConstraintKind) -> _Rule:
    def rule(deciders: Deciders) -> Capability:
        engine = deciders.info.engine
        if not set(kinds) & set(engine.constraint_kinds):
            return Capability("refused", engine.constraint_problem or "its engine enforces no constraints")
        return Capability("emulated", "enforced token by token by a structured decoder")

    return rule


def _by_reasoning(deciders: Deciders) -> Capability:
    if deciders.formats.reasoning is None:
        return Capability("accepted", "this model does not reason: there is nothing to switch or to limit")
    return Capability("emulated", f"core counts and ends it; {deciders.formats.reasoning_parser!r} knows its marks")


def _by_reasoning_switch(deciders: Deciders) -> Capability:
    reasoning = deciders.formats.reasoning
    if reasoning is not None and reasoning.has_switch:
        return Capability("native", "by a switch of the chat template")
    return _by_reasoning(deciders)


def _by_effort(deciders: Deciders) -> Capability:
    reasoning = deciders.formats.reasoning
    if reasoning is not None and reasoning.variables(None, "low"):
        return Capability("native", "by the chat template")
    if reasoning is not None:
        return Capability("accepted", "the chat template knows no efforts; 'none' switches reasoning off")
    return _by_reasoning(deciders)


def _by_compressor(deciders: Deciders) -> Capability:
    if deciders.info.engine.takes_messages:
        return Capability("refused", "the engine behind this model tells no tokens of a text")
    return Capability("emulated", "by a compressor, before the prompt is rendered")


def _by_infill(deciders: Deciders) -> Capability:
    if find_infill_tokens(deciders.info) is None:
        return Capability("refused", NO_INFILL)
    return Capability("native", "by the model's infill tokens")


_SCHEMA: tuple[ConstraintKind, ...] = ("json_object", "json_schema")
_GRAMMAR: tuple[ConstraintKind, ...] = ("lark", "gbnf")


def _rules() -> Iterator[tuple[str, _Rule]]:
    """Yield parameters and their rules; sampling and stopping parameters are the fields of the two structs."""
    for name in (*SamplingParams.__struct_fields__, *StopParams.__struct_fields__):
        if name not in ("extensions", "num_logprobs"):
            yield name, _by_engine(name)
    for rule, names in (
        (_by_core, "model n stream stream_options priority prompt echo best_of max_completion_tokens"),
        (_by_core, "log_prompt"),
        (_by_cache, "cache_salt cache_prompt prompt_cache_key"),
        (_by_nobody, "user metadata store service_tier safety_identifier"),
        (_by_nobody, "prompt_cache_retention prompt_cache_options"),
        (_by_counting, "prediction"),
        (_by_template, "messages"),
        (_by_template_variables, "chat_template_kwargs"),
        (_by_tools, "tools parallel_tool_calls"),
        (_by_tool_constraint, "tool_choice"),
        (_by_reasoning, "thinking_budget"),
        (_by_reasoning_switch, "enable_thinking"),
        (_by_effort, "reasoning_effort"),
        (_by_infill, "suffix"),
        (_by_compressor, "compression"),
        (_by_engine("num_logprobs"), "logprobs top_logprobs"),
        (_by_engine("token_details"), "token_details"),
        (_by_engine("num_prompt_logprobs"), "prompt_logprobs loglikelihood"),
        (_by_constraint(*_SCHEMA), "response_format guided_json json_schema"),
        (_by_constraint("regex"), "guided_regex"),
        (_by_constraint("choice"), "guided_choice"),
        (_by_constraint(*_GRAMMAR), "guided_grammar grammar"),
        (_by_constraint(*_SCHEMA, "regex", "choice", *_GRAMMAR), "structured_outputs"),
    ):
        for name in names.split():
            yield name, rule


_RULES: Mapping[str, _Rule] = MappingProxyType(dict(_rules()))
