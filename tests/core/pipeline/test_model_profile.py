"""The stamp of everything that an answer depends on, and what is said about a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve

from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.chat_formats import ChatFormats
from enginehouse.pipeline.model_profile import ModelProfile, ModelProfiles
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings

INFO = ModelInfo(
    backend="llamacpp",
    max_context=512,
    vocab_size=1000,
    chat_templates={"default": "{{ messages }}"},
    metadata={"quantization": "Q4_K - Medium", "library": "llama-cpp-python 1.2.3"},
)


def cards(registry: PluginRegistry, template: str | None = None) -> ModelProfiles:
    models = {"m": ModelSettings(source="x", chat_template=template)}
    return ModelProfiles(registry, ChatFormats(registry, models), ModelTemplates(models))


def card(info: ModelInfo = INFO, template: str | None = None, allow: tuple[str, ...] = ("parsers",)) -> ModelProfile:
    return cards(PluginRegistry.load(PluginsSettings(allow=allow)), template).of("m", info)


def changed(**fields: Any) -> ModelInfo:
    return msgspec.structs.replace(INFO, **fields)


def test_the_fingerprint_reads_as_a_stamp() -> None:
    parts = card().fingerprint.split("-")

    assert parts[0] == "eh" and parts[2:4] == ["llamacpp", "Q4_K_Medium"]
    assert [len(part) for part in parts[4:]] == [6, 6, 6]


def test_the_fingerprint_survives_a_restart() -> None:
    assert card().fingerprint == card(msgspec.structs.replace(INFO)).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"info": changed(backend="hf")},
        {"info": changed(vocab_size=1001)},
        {"info": changed(metadata={**INFO.metadata, "quantization": "Q8_0"})},
        {"info": changed(metadata={**INFO.metadata, "library": "llama-cpp-python 1.2.4"})},
        {"info": changed(chat_templates={"default": "{{ messages }}!"})},
        {"info": changed(chat_templates={**INFO.chat_templates, "tool_use": "x"})},
        {"allow": ("parsers", "samplers")},
    ],
)
def test_the_fingerprint_changes_with_its_parts(other: dict[str, Any]) -> None:
    assert card(**other).fingerprint != card().fingerprint


def test_the_fingerprint_changes_with_the_template_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("other")

    assert card(template=str(file)).fingerprint != card().fingerprint


def test_tools_are_read_by_the_template_that_is_used_with_tools() -> None:
    tools = "{% if tools %}<tool_call>{'name'</tool_call>{% endif %}"
    both = card(changed(chat_templates={"default": "<think></think>", "tool_use": tools})).formats

    assert (both.tool_parser, both.reasoning_parser, both.template_takes_tools) == ("hermes", "think", True)


def test_the_fingerprint_changes_with_a_plugin_s_version_but_not_with_a_broken_plugin() -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("parsers",)))

    def stamp(version: str, error: str | None = None) -> str:
        plugins = tuple(evolve(record, version=version, error=error, skipped=False) for record in registry.plugins)
        other = evolve(registry, plugins=plugins)
        return cards(other).of("m", INFO).fingerprint

    assert stamp("1") != stamp("2")
    assert stamp("1", "broken") == stamp("2", "broken")


def test_the_version_of_enginehouse_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse.pipeline.model_profile.release", lambda: "9.9")

    assert card().fingerprint.startswith("eh-9.9-llamacpp-")


def test_a_card_is_made_anew_when_the_model_is_opened_again() -> None:
    known = cards(PluginRegistry.load(PluginsSettings(allow=())))
    first = known.of("m", INFO)

    assert known.of("m", INFO) is first
    assert known.of("m", msgspec.structs.replace(INFO)) is not first


def test_quantization_is_the_backend_s_word_or_the_dtype() -> None:
    assert card().quantization == "Q4_K - Medium"
    assert card(changed(metadata={"dtype": "bfloat16"})).quantization == "bfloat16"
    assert card(changed(metadata={})).quantization is None
