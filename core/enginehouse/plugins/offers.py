"""What plugins hand over, checked object by object: complete, of a version we know, under a free name.

Knows no hook and no plugin manager; the loader calls ``accept_*`` for each object that a hook hands over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import attrs
from attrs import define, field

from enginehouse.backend import Backend, ModelSource
from enginehouse.commands import OWN_COMMANDS, Command
from enginehouse.compression import Compressor
from enginehouse.drafting import Drafter
from enginehouse.early_exit import ExitPolicy
from enginehouse.errors import PluginError
from enginehouse.hookspecs import API_VERSION
from enginehouse.logits_processor import LogitsProcessor, ProcessorSampler
from enginehouse.parsers import ReasoningParser, ToolParser
from enginehouse.plugins.authenticator import Authenticator
from enginehouse.request_fields import CORE_FIELDS, RequestField, fields_of
from enginehouse.router import Router
from enginehouse.sampler import SamplerPlugin
from enginehouse.structured import StructuredDecoder
from enginehouse.types import ConstraintKind

__all__ = ["PER_REQUEST", "FindSource", "Offers"]

PER_REQUEST = ("authenticate", "on_event")
"""Hooks that are called while requests come, through a plain function that was made at the start."""

FindSource = Callable[[], ModelSource | None]
"""Finds a model now, or returns None when it is not installed."""


@define(eq=False)
class Offers:
    """Everything that was accepted, by name. ``accept_*`` raise PluginError for what cannot be."""

    backends: dict[str, Backend] = field(factory=dict)
    samplers: dict[str, SamplerPlugin] = field(factory=dict)
    structured_decoders: dict[str, StructuredDecoder] = field(factory=dict)
    logits_processors: dict[str, LogitsProcessor] = field(factory=dict)
    drafters: dict[str, Drafter] = field(factory=dict)
    exit_policies: dict[str, ExitPolicy] = field(factory=dict)
    tool_parsers: dict[str, ToolParser] = field(factory=dict)
    reasoning_parsers: dict[str, ReasoningParser] = field(factory=dict)
    model_sources: dict[str, FindSource] = field(factory=dict)
    commands: dict[str, Command] = field(factory=dict)
    routers: dict[str, Router] = field(factory=dict)
    compressors: dict[str, Compressor] = field(factory=dict)
    request_fields: dict[str, RequestField] = field(factory=dict)
    listeners: dict[str, Callable[..., object]] = field(factory=dict)
    authenticators: dict[str, Authenticator] = field(factory=dict)

    def by_hook(self) -> dict[str, Callable[..., None]]:
        """Hook to the method that takes what it hands over, after the name of the plugin; in call order."""
        return {
            "register_backends": self.accept_backend,
            "register_model_sources": self.accept_model_source,
            "register_samplers": self.accept_sampler,
            "register_structured_decoders": self.accept_structured_decoder,
            "register_logits_processors": self.accept_logits_processor,
            "register_drafters": self.accept_drafter,
            "register_exit_policies": self.accept_exit_policy,
            "register_commands": self.accept_command,
            "register_routers": self.accept_router,
            "register_compressors": self.accept_compressor,
            "register_tool_parsers": self.accept_tool_parser,
            "register_reasoning_parsers": self.accept_reasoning_parser,
        }

    def accept_backend(self, plugin: str, backend: Backend) -> None:
        """Check and keep a backend."""
        _check("backend", backend, Backend, self.backends)
        if not attrs.has(backend.options):
            raise PluginError(f"the options of the backend {backend.name!r} must be an attrs class", plugin)
        self.backends[backend.name] = backend

    def accept_sampler(self, plugin: str, sampler: SamplerPlugin) -> None:
        """Check and keep a sampler and its request fields."""
        _check("sampler", sampler, SamplerPlugin, self.samplers)
        declared = fields_of(sampler.request_fields, sampler.name, plugin)
        for declaration in declared:
            if declaration.name in CORE_FIELDS:
                raise PluginError(f"the request field {declaration.name!r} is core's own", plugin)
            if other := self.request_fields.get(declaration.name):
                raise PluginError(f"the request field {declaration.name!r} is taken by {other.plugin!r}", plugin)
        self.samplers[sampler.name] = sampler
        self.request_fields.update({declaration.name: declaration for declaration in declared})

    def accept_structured_decoder(self, plugin: str, decoder: StructuredDecoder) -> None:
        """Check and keep a structured decoder."""
        _check("structured decoder", decoder, StructuredDecoder, self.structured_decoders)
        unknown = sorted(set(decoder.kinds) - set(get_args(ConstraintKind)))
        if unknown:
            names = ", ".join(unknown)
            raise PluginError(f"the structured decoder {decoder.name!r} names unknown kinds: {names}", plugin)
        self.structured_decoders[decoder.name] = decoder

    def accept_logits_processor(self, plugin: str, processor: LogitsProcessor) -> None:
        """Check and keep a logits processor and its request fields."""
        _check("logits processor", processor, LogitsProcessor, self.samplers)
        self.accept_sampler(plugin, ProcessorSampler(processor))
        self.logits_processors[processor.name] = processor

    def accept_drafter(self, plugin: str, drafter: Drafter) -> None:
        """Check and keep a drafter."""
        _check("drafter", drafter, Drafter, self.drafters)
        if not attrs.has(drafter.options):
            raise PluginError(f"the options of the drafter {drafter.name!r} must be an attrs class", plugin)
        self.drafters[drafter.name] = drafter

    def accept_exit_policy(self, plugin: str, policy: ExitPolicy) -> None:
        """Check and keep an exit policy."""
        _check("exit policy", policy, ExitPolicy, self.exit_policies)
        if not attrs.has(policy.options):
            raise PluginError(f"the options of the exit policy {policy.name!r} must be an attrs class", plugin)
        self.exit_policies[policy.name] = policy

    def accept_tool_parser(self, plugin: str, parser: ToolParser) -> None:
        """Check and keep a tool parser."""
        _check("tool parser", parser, ToolParser, self.tool_parsers)
        self.tool_parsers[parser.name] = parser

    def accept_reasoning_parser(self, plugin: str, parser: ReasoningParser) -> None:
        """Check and keep a reasoning parser."""
        _check("reasoning parser", parser, ReasoningParser, self.reasoning_parsers)
        self.reasoning_parsers[parser.name] = parser

    def accept_router(self, plugin: str, router: Router) -> None:
        """Check and keep a router."""
        _check("router", router, Router, self.routers)
        self.routers[router.name] = router

    def accept_compressor(self, plugin: str, compressor: Compressor) -> None:
        """Check and keep a compressor."""
        _check("compressor", compressor, Compressor, self.compressors)
        self.compressors[compressor.name] = compressor

    def accept_command(self, plugin: str, command: Command) -> None:
        """Check and keep a command."""
        taken = {**self.commands, **dict.fromkeys(OWN_COMMANDS)}
        group, _, member = command.name.partition(" ")
        if member and group in taken:
            raise PluginError(f"the command {command.name!r} cannot belong to the command {group!r}", plugin)
        groups = {name.partition(" ")[0] for name in self.commands if " " in name}
        _check("command", command, Command, taken if member else {**taken, **dict.fromkeys(groups)})
        self.commands[command.name] = command

    def accept_model_source(self, plugin: str, name: str, find: FindSource) -> None:
        """Check and keep a model source."""
        if name in self.model_sources:
            raise PluginError(f"the model source {name!r} is taken", plugin)
        if not callable(find):
            raise PluginError(f"the model source {name!r} must be a function", plugin)
        self.model_sources[name] = find


def _check(noun: str, candidate: Any, protocol: type[Any], taken: Mapping[str, object]) -> None:
    """Raise PluginError unless ``candidate`` has what ``protocol`` asks for, a version we know and a free name."""
    name = getattr(candidate, "name", candidate)
    wanted = [*protocol.__annotations__, *(key for key in vars(protocol) if not key.startswith("_"))]
    missing = [key for key in wanted if not hasattr(candidate, key)]
    if missing:
        raise PluginError(f"the {noun} {name!r} lacks {', '.join(missing)}")
    oldest = max(1, API_VERSION - 1)
    if not oldest <= candidate.api_version <= API_VERSION:
        raise PluginError(
            f"the {noun} {name!r} has api_version {candidate.api_version!r}; "
            f"this Enginehouse takes {oldest} to {API_VERSION}"
        )
    if name in taken:
        raise PluginError(f"the {noun} name {name!r} is taken")
