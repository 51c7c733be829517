"""Support table: request parameters that a model's backend, core and the plugins can honour, with a reason for each.

Each field's row names a rule, and the rule queries the component that decides (the engine's own declaration, the
template, the selected parsers, the active plugins). The pipeline refuses requests by this table or removes what it
refuses, the models route shows it, and docs/api.md is generated from it. Does not know any wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import evolve, field, frozen

from enginehouse.contract.fields import FIELDS
from enginehouse.contract.rows import RequestField, Row
from enginehouse.contract.types import GenerateRequest, ModelInfo, ToolUse
from enginehouse.pipeline.chat_formats import ModelFormats
from enginehouse.pipeline.prompting import NO_INFILL, find_infill_tokens

Support = Literal["native", "emulated", "accepted", "refused"]
"""``native``: done by the model or its library. ``emulated``: done by core or a plugin, identically on every backend.
``accepted``: validated, but without effect on answers. ``refused``: a 400 that names the parameter.
"""


@frozen
class Capability:
    """Support level of one parameter, and the reason.

    Attributes:
        refuses: uses of the parameter that are refused although others are honoured, each with the reason:
            ``required`` calls, ``strict`` tools, kinds of constraints, and ``composition`` for a constraint that is
            enforced together with tool calls.
    """

    support: Support
    reason: str = ""
    refuses: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Deciders:
    """Inputs that determine a model's capabilities.

    Attributes:
        has_template: the model has a chat template; otherwise a plain fallback is used.
        plugin_fields: parameters added by plugins, by name.
    """

    info: ModelInfo
    formats: ModelFormats
    has_template: bool
    plugin_fields: Mapping[str, RequestField]


_Rule = Callable[[Row, Deciders], Capability]


def capabilities_of(deciders: Deciders) -> dict[str, Capability]:
    """Return the capability of every parameter that is not refused for all models, by name."""
    core = {name: _RULES[row.by](row, deciders) for name, row in FIELDS.items()}
    plugins = {name: _by_plugin(field, deciders) for name, field in deciders.plugin_fields.items()}
    rules = sorted({**core, **plugins}.items())
    return {name: _declared(name, capability, deciders) for name, capability in rules}


def find_unsupported(request: GenerateRequest, capabilities: Mapping[str, Capability]) -> tuple[tuple[str, str], ...]:
    """Return the parameters of a request that the model cannot honour, each with the reason."""
    found: dict[str, str] = {}
    for given in _given(request):
        capability = capabilities.get(given.name)
        if capability is None or (given.name in _OF_TOOLS and "tools" in found):
            continue
        if capability.support == "refused":
            found[given.named] = capability.reason
        elif given.use in capability.refuses:
            found[given.path] = capability.refuses[given.use]
    return tuple(found.items())


# -- parameters of a request ---------------------------------------------------------------------------

_NOTHING = GenerateRequest(request_id="", model=None)
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_MEMBERS = tuple(dict.fromkeys(row.member for row in FIELDS.values() if row.member))
_NAMES = {member: next(name for name, row in FIELDS.items() if row.member == member) for member in _MEMBERS}
"""By member of a request, the first field that sets it; in the order of the table."""


@frozen
class _Given:
    """A parameter that a request gives.

    Attributes:
        name: the field of the body.
        use: a use that some models do not support (``Capability.refuses``); "" for any other.
        path: path of the member that asks for this use.
    """

    name: str
    use: str = ""
    path: str = ""

    @property
    def named(self) -> str:
        """The field as the client wrote it: other surfaces have other names for a field of OpenAI's."""
        return self.path if self.path and _root(self.path) != self.name else self.name


def _given(request: GenerateRequest) -> Iterator[_Given]:
    """Yield the parameters that some models cannot honour, once for each use; of two names of a value, the first."""
    for member, name in _NAMES.items():  # for every request
        if _is_given(request, member):
            yield _Given(name, path=request.adapters_param if member == "adapters" else "")
    for fields in request.extensions.values():
        yield from (_Given(name) for name, value in fields.items() if value is not False)
    uses_tools = request.tool_use is not None and bool(request.tool_use.callable)
    if request.tool_use is not None and uses_tools:
        yield from _of_tools(request.tool_use, has_constraint=request.constraint is not None)
    if request.num_choices > 1:
        yield _Given("n")
    if (constraint := request.constraint) is not None:
        root = _root(constraint.param)
        name = root if root in FIELDS else "response_format"
        yield _Given(name, constraint.kind, constraint.param)
        if uses_tools:
            yield _Given(name, "composition", root)


def _of_tools(use: ToolUse, *, has_constraint: bool) -> Iterator[_Given]:
    yield _Given("tools")
    if use.choice == "required":
        yield _Given("tool_choice", "required", "tool_choice")
    if use.parallel is False:
        yield _Given("parallel_tool_calls")
    strict = next((f"{tool.param}.strict" for tool in use.callable if tool.strict), None)
    if strict is not None:
        # Where something else is enforced already, strict tools need no more than that.
        is_alone = use.choice != "required" and not has_constraint
        yield _Given("tools", "strict" if is_alone else "composition", strict)


_PLACES = {member: member.rpartition(".")[::2] for member in _MEMBERS}
"""Names of the object that holds a member, empty for the request itself, and of the member there."""


def _is_given(request: GenerateRequest, member: str) -> bool:
    outer, name = _PLACES[member]
    holder: Any = getattr(request, outer) if outer else request
    if member in _DEFAULTS:
        return bool(getattr(holder, name) != _DEFAULTS[member])
    return name in holder


def _defaults() -> Iterator[tuple[str, Any]]:
    for member, (outer, name) in _PLACES.items():
        holder = getattr(_NOTHING, outer) if outer else _NOTHING
        if not isinstance(holder, Mapping):
            yield member, getattr(holder, name)


_DEFAULTS = dict(_defaults())
"""Values of members that are not given; those of mappings are absent instead."""


def without_parameters(request: GenerateRequest, params: Iterable[str]) -> tuple[GenerateRequest, tuple[str, ...]]:
    """Drop the features that ``params`` ask for; also return the paths that were dropped, in order.

    Those without which there is nothing to answer, such as messages, stay.
    """
    dropped = []
    for param in params:
        left = _without_parameter(request, param)
        if left is not None:
            request = left[0]
            dropped.append(left[1])
    return request, tuple(dropped)


def _without_parameter(request: GenerateRequest, param: str) -> tuple[GenerateRequest, str] | None:
    """Drop the feature that ``param``, a path in the request's body, asks for; also return the path that was dropped.

    None if it cannot be dropped.
    """
    name = _root(param)
    if request.constraint is not None and name == _root(request.constraint.param):
        return evolve(request, constraint=None), name
    if request.tool_use is not None and name in _OF_TOOLS:
        return _without_tools(request, request.tool_use, param)
    if name in FIELDS and FIELDS[name].by == "adapters":
        return None  # the base model must not answer in its place
    if name in FIELDS:
        return _without_member(request, name, FIELDS[name].member)
    for owner, fields in request.extensions.items():
        if name in fields:
            kept = {**request.extensions, owner: _without(fields, name)}
            # An owner without fields is not named at all: the engine may not know it.
            return evolve(request, extensions={key: given for key, given in kept.items() if given}), name
    return None


def _without_member(request: GenerateRequest, name: str, member: str) -> tuple[GenerateRequest, str] | None:
    """Set the member of a request to the value that means "not given"."""
    if not member or not _is_given(request, member):
        return None
    outer, inner = _PLACES[member]
    if member not in _DEFAULTS:
        changed: dict[str, Any] = {outer: _without(getattr(request, outer), inner)}
    elif outer:
        changed = {outer: evolve(getattr(request, outer), **{inner: None})}
    else:
        changed = {inner: getattr(_NOTHING, inner)}
    return evolve(request, **changed), name


def _without_tools(request: GenerateRequest, use: ToolUse, param: str) -> tuple[GenerateRequest, str] | None:
    """Drop the unsupported tool feature: the argument check, the forced call, or the tools themselves."""
    if param.endswith(".strict"):
        lenient = tuple(evolve(tool, strict=False) for tool in use.tools)
        return None if lenient == use.tools else (evolve(request, tool_use=evolve(use, tools=lenient)), param)
    if param == "parallel_tool_calls":
        return (evolve(request, tool_use=evolve(use, parallel=None)), param) if use.parallel is False else None
    if param != "tool_choice":
        return evolve(request, tool_use=None), param
    return (evolve(request, tool_use=evolve(use, choice="auto", only=None)), param) if use.choice != "auto" else None


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != name}


def _root(param: str) -> str:
    return param.split(".", 1)[0].split("[", 1)[0]


# -- rules ---------------------------------------------------------------------------------------------


def _declared(name: str, ruled: Capability, deciders: Deciders) -> Capability:
    """Return the engine's declaration for a parameter by its wire name, or the rule's if it leaves it to core."""
    engine = deciders.info.engine
    if name in engine.refused:
        return Capability("refused", engine.refused[name])
    if name in engine.native:
        return evolve(ruled, support="native", reason=f"by {deciders.info.backend}")
    return ruled


def _by_server(_: Row, __: Deciders) -> Capability:
    return Capability("emulated", "by the server, the same on every backend")


def _by_cache(row: Row, deciders: Deciders) -> Capability:
    if deciders.info.engine.takes_messages:
        return Capability("accepted", "caching is up to the remote server")
    return _by_server(row, deciders)


def _by_adapters(_: Row, deciders: Deciders) -> Capability:
    mixing = deciders.info.engine.adapters
    if mixing == "none":
        return Capability("refused", "this model takes no adapters")
    if deciders.info.engine.takes_messages:
        return Capability("native", f"by {deciders.info.backend}")
    passes = "one pass of a step for each set of adapters" if mixing == "per_pass" else "together in one pass"
    return Capability("native", f"by {deciders.info.backend}, {passes}")


def _by_caller(_: Row, __: Deciders) -> Capability:
    return Capability("accepted", "for the caller's own use; no answer depends on it")


def _by_counting(_: Row, __: Deciders) -> Capability:
    return Capability("accepted", "counted in usage; no answer depends on it")


def _by_engine(row: Row, deciders: Deciders) -> Capability:
    """Sampling, stopping and reporting: native where the engine says so, otherwise emulated by core."""
    name = row.member.rpartition(".")[2]
    return _declared(name, Capability("emulated", "by core, the same on every backend"), deciders)


def _by_plugin(field: RequestField, deciders: Deciders) -> Capability:
    if not field.is_sampled:
        return _by_preparer(field, deciders)
    at_work = deciders.info.engine.samplers
    if at_work is not None and field.owner not in at_work:
        return Capability("refused", f"the sampler {field.owner!r} is not installed where this model runs")
    return Capability("emulated", f"by the plugin {field.plugin}, the same on every backend")


def _by_preparer(field: RequestField, deciders: Deciders) -> Capability:
    if deciders.info.engine.takes_messages:
        return Capability("refused", "the engine of this model renders prompts itself")
    return Capability("emulated", f"before the prompt is rendered, by {field.plugin!r}")


def _by_template(_: Row, deciders: Deciders) -> Capability:
    if deciders.has_template:
        return Capability("native", "by the model's chat template")
    return Capability("emulated", "this model has no chat template; a plain one is used")


def _by_last_turn(row: Row, deciders: Deciders) -> Capability:
    if deciders.info.engine.takes_messages:
        return Capability("refused", "the engine of this model renders chats itself")
    return _by_template(row, deciders)


def _by_template_variables(_: Row, deciders: Deciders) -> Capability:
    if deciders.has_template:
        return Capability("native", "by the model's chat template")
    return Capability("accepted", "this model has no chat template that reads them")


def _by_tools(_: Row, deciders: Deciders) -> Capability:
    formats = deciders.formats
    if formats.tools is None:
        return Capability("refused", "no loaded plugin knows how this model calls tools")
    if formats.template_takes_tools:
        return Capability("native", f"by the chat template; {formats.tool_parser!r} parses the calls")
    return Capability("emulated", f"described in the prompt; {formats.tool_parser!r} parses the calls")


def _by_called_tools(row: Row, deciders: Deciders) -> Capability:
    """Tools that may be called; strict ones need enforced calls."""
    tools, refuses = _by_tools(row, deciders), {}
    if problem := _composition_problem(deciders):
        refuses = {"strict": problem, "composition": problem}
    elif deciders.formats.strict_problem and not deciders.info.engine.takes_messages:
        refuses = {"strict": deciders.formats.strict_problem}
    return evolve(tools, refuses=refuses)


def _by_tool_constraint(row: Row, deciders: Deciders) -> Capability:
    tools, engine = _by_tools(row, deciders), deciders.info.engine
    if tools.support == "refused":
        return tools
    if problem := _composition_problem(deciders):
        reason = f"'auto' and 'none' only: {engine.constraint_problem or 'its engine does not enforce calls'}"
        return Capability("emulated", reason, {"required": problem})
    return Capability("emulated", "enforced by a grammar")


def _composition_problem(deciders: Deciders) -> str:
    """Return why core cannot enforce tool calls for the model; "" if it can, or if the engine gets the tools itself."""
    engine = deciders.info.engine
    if engine.takes_messages or "composition" in engine.constraint_kinds:
        return ""
    return f"{engine.constraint_problem or 'its engine does not enforce calls'} (composition)"


def _by_constraint(row: Row, deciders: Deciders) -> Capability:
    engine = deciders.info.engine
    problem = engine.constraint_problem or "its engine does not enforce constraints"
    if not set(row.kinds) & set(engine.constraint_kinds):
        return Capability("refused", problem)
    refuses = {kind: f"{problem} ({kind})" for kind in row.kinds if kind not in engine.constraint_kinds}
    if composition := _composition_problem(deciders):
        refuses["composition"] = composition
    return Capability("emulated", "enforced token by token by a structured decoder", refuses)


def _by_reasoning(_: Row, deciders: Deciders) -> Capability:
    if deciders.formats.reasoning is None:
        return Capability("accepted", "this model does not reason")
    return Capability("emulated", f"counted and ended by core; {deciders.formats.reasoning_parser!r} finds its markers")


def _by_reasoning_switch(row: Row, deciders: Deciders) -> Capability:
    reasoning = deciders.formats.reasoning
    if reasoning is not None and reasoning.has_switch:
        return Capability("native", "by a switch of the chat template")
    return _by_reasoning(row, deciders)


def _by_effort(row: Row, deciders: Deciders) -> Capability:
    reasoning = deciders.formats.reasoning
    if reasoning is not None and reasoning.variables(None, "low"):
        return Capability("native", "by the chat template")
    if reasoning is not None:
        return Capability("accepted", "the chat template has no efforts; 'none' disables reasoning")
    return _by_reasoning(row, deciders)


def _by_infill(_: Row, deciders: Deciders) -> Capability:
    if find_infill_tokens(deciders.info) is None:
        return Capability("refused", NO_INFILL)
    return Capability("native", "by the model's infill tokens")


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "adapters": _by_adapters,
        "cache": _by_cache,
        "caller": _by_caller,
        "constraint": _by_constraint,
        "counting": _by_counting,
        "effort": _by_effort,
        "engine": _by_engine,
        "infill": _by_infill,
        "last_turn": _by_last_turn,
        "reasoning": _by_reasoning,
        "reasoning_switch": _by_reasoning_switch,
        "server": _by_server,
        "template": _by_template,
        "template_variables": _by_template_variables,
        "tool_choice": _by_tool_constraint,
        "tools": _by_called_tools,
        "parallel_tool_calls": _by_tools,
    }
)
"""The rules that rows name (``Row.by``)."""
