"""Which chat template a model is asked with: the one that its settings name, its own, or a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.prompt.fallback import fallback_template
from enginehouse.settings.config import ModelSettings

__all__ = ["ModelTemplates"]


class ModelTemplates:
    """The chat templates of all configured models.

    Args:
        models: their settings, by name.

    Raises:
        ConfigError: a template file cannot be read.
    """

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._of_settings = {name: _read_template(name, model) for name, model in models.items()}

    def all(self, model: str, info: ModelInfo) -> Mapping[str, str]:
        """Every template that may be used, by name; empty where a plain one stands in."""
        named = self._of_settings.get(model)
        return {"chat_template": named} if named else {name: text for name, text in info.chat_templates.items() if text}

    def choose(self, model: str, info: ModelInfo, *, with_tools: bool) -> str:
        """The template of a chat; some models have another one for chats with tools."""
        named = self._of_settings.get(model)
        for_tools = info.chat_templates.get("tool_use") if with_tools else None
        own = named or for_tools or info.chat_templates.get("default")
        return own or fallback_template(info.special_tokens)


_MAX_TEMPLATE_BYTES = 4 * 2**20


def _read_template(name: str, model: ModelSettings) -> str | None:
    """The chat template file that the settings name."""
    if model.chat_template is None:
        return None
    try:
        return read_regular_text(Path(model.chat_template).expanduser(), _MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        path = f"models.{name}.chat_template"
        raise ConfigError(f"{path}: cannot read {model.chat_template!r}: {error}", path) from error
