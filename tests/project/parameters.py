"""The table of docs/api.md that says what becomes of each parameter, made by the rules that decide about requests.

Which parameters the APIs have that Enginehouse speaks is written down here, from their documentation; everything else
is asked of ``capabilities``. What depends on the model is asked twice: for a model that has everything
that a model can bring, a device that draws included, and for one that brings nothing. Of the backend ``remote`` these
are another Enginehouse that serves such a model, and a server of which nothing but OpenAI's API is known.
"""

from __future__ import annotations

import ast

import attrs
import msgspec

from enginehouse.contract.backend import DRAW_FIELDS
from enginehouse.contract.fields import ChatFields, CompletionFields
from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.refusals import refused_fields
from enginehouse.contract.types import EngineCapabilities, EngineSettings, ModelInfo
from enginehouse.engine.loop import StepEngine
from enginehouse.pipeline.capabilities import Capability, Deciders, capabilities_of
from enginehouse.pipeline.chat_formats import ChatFormats
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse_remote.kinds import KINDS
from enginehouse_remote.options import RemoteOptions
from enginehouse_remote.probing import engine_capabilities, restricted
from enginehouse_testkit.fake_runner import FakeRunner

from .repository import ROOT, syntax_of

__all__ = ["SEEDS", "parameter_table"]

SEEDS: dict[str, str] = {
    "octomil": "model messages stream temperature top_p max_tokens stop response_format n",
    "mini-sglang": (
        "model messages prompt max_tokens temperature top_k top_p n stream stop presence_penalty frequency_penalty "
        "ignore_eos"
    ),
    "OctoAI": (
        "messages model stream frequency_penalty ignore_eos log_prompt logit_bias loglikelihood logprobs max_tokens "
        "min_p n peft presence_penalty repetition_penalty response_format stop stream_options temperature tool_choice "
        "tools top_logprobs top_p user"
    ),
    "oMLX": (
        "model messages stream stream_options temperature top_p top_k min_p max_tokens stop seed tools tool_choice "
        "response_format structured_outputs chat_template_kwargs thinking_budget presence_penalty frequency_penalty "
        "xtc_probability xtc_threshold"
    ),
    "OpenAI": (
        "messages model audio best_of echo frequency_penalty function_call functions logit_bias logprobs "
        "max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls prediction "
        "presence_penalty prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort "
        "response_format safety_identifier seed service_tier stop store stream stream_options suffix temperature "
        "tool_choice tools top_logprobs top_p user verbosity web_search_options"
    ),
}
"""API to its request parameters."""

_RICH_TEMPLATE = (
    '{{ messages }}{% if tools %}<tool_call>{"name": ...}</tool_call>{% endif %}'
    "{% if enable_thinking %}<think>{% endif %}</think>{{ reasoning_effort }}"
)


def parameter_table() -> str:
    """One row per parameter."""
    registry = PluginRegistry.load(PluginsSettings())
    # A backend that places workers has the parameters of the one inside.
    backends = sorted(name for name, backend in registry.backends.items() if backend.opens != "workers")
    by_backend = {
        name: (_capabilities(registry, name, is_rich=True), _capabilities(registry, name, is_rich=False))
        for name in backends
    }
    chats, completions = (
        {attribute.name for attribute in attrs.fields(body)} | registry.request_fields.keys()
        for body in (ChatFields, CompletionFields)
    )
    refused = refused_fields(chats | completions)
    head = ["parameter", "of", "where", *(f"`{name}`" for name in backends), "how"]
    rows = [f"| {' | '.join(head)} |\n", "|---" * len(head) + "|\n"]
    for name in sorted({*chats, *completions, *refused}):
        where = {(True, True): "both", (True, False): "chat", (False, True): "completions"}.get(
            (name in chats, name in completions), "-"
        )
        known = [
            (Capability("refused", refused[name]),) * 2 if name in refused else (rich[name], bare[name])
            for rich, bare in by_backend.values()
        ]
        of = ", ".join(seed for seed, names in SEEDS.items() if name in names.split())
        ours = [pair for backend, pair in zip(backends, known, strict=True) if backend != "remote"]
        reasons: dict[str, dict[str, None]] = {}
        for capability in (one for pair in ours for one in pair):
            reasons.setdefault(capability.support, {})[capability.reason.rstrip(".")] = None
        texts = {support: ", ".join(texts) for support, texts in reasons.items()}
        how = "; ".join(f"{support}: {text}" if len(texts) > 1 else text for support, text in texts.items())
        cells = [f"`{name}`", of, where, *(_support(*pair) for pair in known), how]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _capabilities(registry: PluginRegistry, backend: str, *, is_rich: bool) -> dict[str, Capability]:
    """Of a model of that backend which brings everything, or nothing."""
    opens_runner = registry.backends[backend].opens == "model"
    said = _said_by_core(registry, backend, is_rich) if opens_runner else _said_by_remote(registry, is_rich)
    info = ModelInfo(
        backend=backend,
        max_context=2,
        vocab_size=2,
        engine=said,
        infill_tokens=("<prefix>", "<suffix>", "<middle>") if is_rich else (),
    )
    chat = ChatFormat(_RICH_TEMPLATE if is_rich else "")
    formats = ChatFormats(registry, {"m": ModelSettings(source="")}).of("m", chat)
    fields = registry.request_fields
    return capabilities_of(Deciders(info=info, formats=formats, has_template=is_rich, plugin_fields=fields))


def _said_by_core(registry: PluginRegistry, backend: str, is_rich: bool) -> EngineCapabilities:
    """What core's engine says over a runner."""
    engine = StepEngine(FakeRunner(), EngineSettings(), registry.samplers, registry.structured_decoders.values())
    said = engine.capabilities
    engine.close()
    return msgspec.structs.replace(said, native=_drawn_on_devices(backend)) if is_rich else said


def _said_by_remote(registry: PluginRegistry, is_rich: bool) -> EngineCapabilities:
    """What the remote engine says of an Enginehouse that serves a rich model, or of any server."""
    there = _capabilities(registry, "llamacpp", is_rich=True) if is_rich else None
    said = {name: attrs.asdict(capability) for name, capability in there.items()} if there is not None else None
    kind = restricted(KINDS["enginehouse" if is_rich else "openai"], said, RemoteOptions())
    return engine_capabilities(kind, said, "the remote server does not support it")


def _support(rich: Capability, bare: Capability) -> str:
    return rich.support if rich.support == bare.support else f"{rich.support}, else {bare.support}"


def _drawn_on_devices(backend: str) -> tuple[str, ...]:
    """What a backend draws itself where it has a device; read from its source, for importing it needs the device."""
    for path in (ROOT / "plugins" / f"enginehouse_{backend}").rglob("sampling.py"):
        for statement in syntax_of(path).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SUPPORTED":
                assert ast.unparse(statement.value) == "DRAW_FIELDS"
                return tuple(DRAW_FIELDS)
    return ()
