"""The kinds of plugin objects, one row each. A new kind is a new row.

The attributes of :class:`PluginObjects` are the table, and :data:`KINDS` is read from it. The loader, the registry, the
test kit and the generated pages in docs/ iterate over it, so they name only kinds that need special treatment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import attrs
from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.commands import OWN_COMMANDS, Command
from enginehouse.contract.compressor import Compressor
from enginehouse.contract.drafter import Drafter
from enginehouse.contract.errors import PluginError
from enginehouse.contract.exit_policy import ExitPolicy
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.logits_processor import LogitsProcessor
from enginehouse.contract.model_hub import ModelHub
from enginehouse.contract.page import Page
from enginehouse.contract.parsers import ReasoningParser, ToolParser
from enginehouse.contract.preparer import Preparer
from enginehouse.contract.router import Router
from enginehouse.contract.sampler import CORE_ORDER, SamplerPlugin, role_of
from enginehouse.contract.structured import StructuredDecoder
from enginehouse.contract.surface import GenerationRoute, ReplyRoute, Surface
from enginehouse.contract.types import ConstraintKind
from enginehouse.plugins.authenticator import Authenticator
from enginehouse.plugins.processors import ProcessorSampler

FindSource = Callable[[], ModelSource | None]
"""Finds a model now, or returns None if it is not installed."""


@frozen(kw_only=True)
class Kind:
    """A kind of plugin object.

    Attributes:
        name: the attribute of the registry that holds the objects by name.
        hook: the hook that registers the objects; with ``wrap``, the hook that becomes the object.
        noun: name of the kind in messages; with underscores, the name of the fixture in its contract suites.
        protocol: the interface of an object. A function type means that plugins register a name and a function.
        suites: its contract suites as ``module:class``; text only, because core does not import the test kit.
        api_version: version of ``protocol``; objects of this and of the previous version are accepted.
        core_names: names that core uses itself, which plugins cannot use.
        check: additional validation, given an object and the names in use; raises PluginError.
        also: another kind as which each object is registered as well, and the function that converts it.
        wrap: creates the object from a plugin's name and its hook as a plain function, for hooks that are called while
            the server runs.
    """

    name: str
    hook: str
    noun: str
    protocol: Any
    suites: tuple[str, ...] = ()
    api_version: int = API_VERSION
    core_names: tuple[str, ...] = ()
    check: Callable[[Any, Collection[str]], None] | None = None
    also: tuple[str, Callable[[Any], Any]] | None = None
    wrap: Callable[[str, Callable[..., Any]], Any] | None = None

    @property
    def fixture(self) -> str:
        """Name of the pytest fixture that provides an object to the contract suites."""
        return self.noun.replace(" ", "_")

    @property
    def takes_functions(self) -> bool:
        """True if plugins register a name and a function instead of an object with a name."""
        return self.wrap is None and get_origin(self.protocol) is Callable


def _check_place(sampler: SamplerPlugin, taken: Collection[str]) -> None:
    """Check that a step has none of the positions and names of core's steps; a temperature replaces core's."""
    place = next((name for name, order in CORE_ORDER.items() if order == sampler.order), None)
    if place is not None and role_of(sampler) not in ("temperature", "processor"):
        message = f"the sampler {sampler.name!r} has the order {sampler.order} of core's step {place!r}"
        raise PluginError(f"{message}; use any other, such as {sampler.order + 1}")
    if own := sorted(set(getattr(sampler, "aliases", ())) & set(CORE_ORDER)):
        raise PluginError(f"the sampler {sampler.name!r} has the alias {own[0]!r}, which is the name of core's step")


def _check_constraint_kinds(decoder: StructuredDecoder, taken: Collection[str]) -> None:
    if not decoder.kinds:
        raise PluginError(f"the structured decoder {decoder.name!r} has no kinds of constraints: kinds is empty")
    unknown = sorted(set(decoder.kinds) - set(get_args(ConstraintKind)))
    if unknown:
        names = ", ".join(unknown)
        raise PluginError(f"the structured decoder {decoder.name!r} names unknown kinds: {names}")


def _check_command_name(command: Command, taken: Collection[str]) -> None:
    """Check that a group has no command's name, and a command no group's name."""
    group, _, member = command.name.partition(" ")
    groups = {name.partition(" ")[0] for name in taken if " " in name}
    if member and group in {*taken, *OWN_COMMANDS}:
        raise PluginError(f"the command {command.name!r} cannot belong to the command {group!r}")
    if not member and group in OWN_COMMANDS:
        raise PluginError(f"the command name {command.name!r} is core's own")
    if not member and group in groups:
        raise PluginError(f"the command name {command.name!r} is taken by a group of commands")


def _check_routes(surface: Surface, taken: Collection[str]) -> None:
    """Check that no address is one of core's, every body has a class, and the header of the id can be sent."""
    header = surface.request_id_header
    if header is not None and not (isinstance(header, str) and re.fullmatch(r"[A-Za-z0-9-]+", header)):
        problem = f"the request_id_header {header!r}, which must be None or the name of a header, such as 'request-id'"
        raise PluginError(f"the surface {surface.name!r} has {problem}")
    for route in surface.routes:
        where = f"the surface {surface.name!r} has the route {route.path!r}"
        if not route.path.startswith("/") or re.match(r"/(admin|compat|health|metrics|schema|ui)(/|$)", route.path):
            raise PluginError(f"{where}, which must begin with / and is not an address of core")
        if isinstance(route, GenerationRoute):
            if not attrs.has(route.body) or "stream" not in attrs.fields_dict(route.body):
                raise PluginError(f"{where}, whose body must be an attrs class with the attribute 'stream'")
        elif not isinstance(route, ReplyRoute):
            raise PluginError(f"{where}, which is neither a GenerationRoute nor an ReplyRoute")
        elif route.body is not None and not attrs.has(route.body):
            raise PluginError(f"{where}, whose body must be an attrs class or None")


def _check_folder(page: Page, taken: Collection[str]) -> None:
    """Check that the folder has a start page."""
    if not Path(page.folder, "index.html").is_file():
        raise PluginError(f"the page {page.name!r} has no index.html in its folder {str(page.folder)!r}")


def _kind(noun: str, *suites: str, **more: Any) -> Any:
    """Create a row of the table; ``more`` are further attributes of :class:`Kind`."""
    suites = tuple(f"enginehouse_testkit.{suite}" for suite in suites)
    return attrs.field(default=MappingProxyType({}), metadata={"noun": noun, "suites": suites, **more})


@frozen(kw_only=True)
class PluginObjects:
    """All plugin objects by name, one attribute per kind; hooks are called in this order.

    An attribute's type is the interface of the objects; the hook is ``register_<attribute>`` unless the row specifies
    another. Objects are in order of registration, which is the order of preference among decoders and parsers.
    """

    backends: Mapping[str, Backend] = _kind(
        "backend",
        "backend_contract:BackendContract",
        "runner_contract:RunnerContract",
        "pooler_contract:PoolerContract",
        "engine_contract:EngineContract",
    )
    model_sources: Mapping[str, FindSource] = _kind("model source")
    model_hubs: Mapping[str, ModelHub] = _kind("model hub")
    samplers: Mapping[str, SamplerPlugin] = _kind(
        "sampler", "sampler_contract:SamplerContract", core_names=tuple(CORE_ORDER), check=_check_place
    )
    structured_decoders: Mapping[str, StructuredDecoder] = _kind(
        "structured decoder", "structured_decoder_contract:StructuredDecoderContract", check=_check_constraint_kinds
    )
    logits_processors: Mapping[str, LogitsProcessor] = _kind(
        "logits processor", "logits_processor_contract:LogitsProcessorContract", also=("samplers", ProcessorSampler)
    )
    drafters: Mapping[str, Drafter] = _kind("drafter", "drafter_contract:DrafterContract")
    exit_policies: Mapping[str, ExitPolicy] = _kind("exit policy", "exit_policy_contract:ExitPolicyContract")
    commands: Mapping[str, Command] = _kind("command", check=_check_command_name)
    surfaces: Mapping[str, Surface] = _kind("surface", core_names=("openai",), check=_check_routes)
    pages: Mapping[str, Page] = _kind("page", check=_check_folder)
    routers: Mapping[str, Router] = _kind("router", "router_contract:RouterContract")
    compressors: Mapping[str, Compressor] = _kind("compressor", "compressor_contract:CompressorContract")
    preparers: Mapping[str, Preparer] = _kind("preparer")
    tool_parsers: Mapping[str, ToolParser] = _kind(
        "tool parser", "tool_parser_contract:ToolParserContract", core_names=("none",)
    )
    reasoning_parsers: Mapping[str, ReasoningParser] = _kind(
        "reasoning parser", "reasoning_parser_contract:ReasoningParserContract", core_names=("none",)
    )
    authenticators: Mapping[str, Authenticator] = _kind(
        "authenticator", "authenticator_contract:AuthenticatorContract", hook="authenticate", wrap=Authenticator
    )
    listeners: Mapping[str, Callable[..., object]] = _kind(
        "listener", hook="on_event", wrap=lambda plugin, listener: listener
    )


def _read_table() -> dict[str, Kind]:
    rows = attrs.fields(attrs.resolve_types(PluginObjects))
    return {
        row.name: Kind(
            **{"name": row.name, "hook": f"register_{row.name}", "protocol": get_args(row.type)[1], **row.metadata}
        )
        for row in rows
    }


KINDS: Mapping[str, Kind] = MappingProxyType(_read_table())
"""All kinds by name, in the order in which their hooks are called."""
