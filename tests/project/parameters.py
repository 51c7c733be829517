"""The table of docs/api.md that says what becomes of each parameter, made by the rules that decide about requests.

Which parameters the APIs have that Enginehouse speaks is written down here, from their documentation; everything else
is asked of :mod:`enginehouse.capabilities`. What depends on the model is asked twice: for a model that has everything
that a model can bring, a device that draws included, and for one that brings nothing.
"""

from __future__ import annotations

import ast

import attrs
import msgspec

from enginehouse.api.chat import ChatBody
from enginehouse.api.completions import CompletionBody
from enginehouse.api.unsupported import refused_fields
from enginehouse.capabilities import Capability, Deciders, capabilities_of
from enginehouse.chat_formats import ChatFormats
from enginehouse.config import ModelSettings, PluginsSettings
from enginehouse.engine.loop import StepEngine
from enginehouse.parsers import ChatFormat
from enginehouse.plugins import PluginRegistry
from enginehouse.testing.fake_runner import FakeRunner
from enginehouse.types import EngineSettings, ModelInfo

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
    backends = sorted(name for name, backend in registry.backends.items() if backend.opens == "runner")
    by_backend = {
        name: (_capabilities(registry, name, is_rich=True), _capabilities(registry, name, is_rich=False))
        for name in backends
    }
    chats, completions = (
        {attribute.name for attribute in attrs.fields(body)} | registry.request_fields.keys()
        for body in (ChatBody, CompletionBody)
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
        reasons = dict.fromkeys(capability.reason.rstrip(".") for pair in known for capability in pair)
        cells = [f"`{name}`", of, where, *(_support(*pair) for pair in known), "; else: ".join(reasons)]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _capabilities(registry: PluginRegistry, backend: str, *, is_rich: bool) -> dict[str, Capability]:
    """Of a model of that backend which brings everything, or nothing."""
    decoders = registry.structured_decoders.values()
    engine = StepEngine(FakeRunner(), EngineSettings(), registry.samplers, decoders)
    said = engine.capabilities
    if is_rich:
        said = msgspec.structs.replace(said, native=_drawn_on_devices(backend))
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
    engine.close()
    return capabilities_of(Deciders(info=info, formats=formats, has_template=is_rich, plugin_fields=fields))


def _support(rich: Capability, bare: Capability) -> str:
    return rich.support if rich.support == bare.support else f"{rich.support}, else {bare.support}"


def _drawn_on_devices(backend: str) -> tuple[str, ...]:
    """What a backend draws itself where it has a device; read from its source, for importing it needs the device."""
    for path in (ROOT / "plugins" / f"enginehouse_{backend}").rglob("sampling.py"):
        for statement in syntax_of(path).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SUPPORTED":
                assert isinstance(statement.value, ast.Call)
                return tuple(ast.literal_eval(statement.value.args[0]))
    return ()
