"""A chat to be rendered, and its template: the model's own, or a plain fallback."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.contract.types import Message, ModelInfo

if TYPE_CHECKING:  # rendering processes start sooner without the settings
    from enginehouse.settings.config import ModelSettings


# The files of Qwen and SmolLM2 name a begin-of-sequence token, but their own templates do not write it.
CHATML = """\
{%- if bos_token not in ('<|im_start|>', '<|endoftext|>') %}{{ bos_token }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

GEMMA = """\
{{- bos_token }}
{%- set turns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set turns.system = turns.system ~ message.content | trim ~ '\\n\\n' %}
    {%- else %}
        {%- set role = 'model' if message.role == 'assistant' else message.role %}
        {{- '<start_of_turn>' ~ role ~ '\\n' ~ turns.system ~ message.content | trim ~ '<end_of_turn>\\n' }}
        {%- set turns.system = '' %}
    {%- endif %}
{%- endfor %}
{%- if turns.system %}
    {{- '<start_of_turn>user\\n' ~ turns.system | trim ~ '<end_of_turn>\\n' }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content ~ '\\n\\n' }}
    {%- else %}
        {{- message.role | capitalize ~ ': ' ~ message.content ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""


def fallback_template(special_tokens: Container[str]) -> str:
    """Return the template for a model without one.

    Args:
        special_tokens: its control-token strings (:attr:`enginehouse.contract.types.ModelInfo.special_tokens`).
    """
    if "<|im_start|>" in special_tokens:
        return CHATML
    if "<start_of_turn>" in special_tokens:
        return GEMMA
    return PLAIN


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and the template that turns them into a prompt.

    Roles come from a closed set that the caller has checked. All other strings in ``messages`` and ``extra`` are
    untrusted: control-token strings in them stay ordinary text.

    Attributes:
        template: Jinja source.
        special_tokens: all control-token strings of the model.
        add_generation_prompt: end with the beginning of an assistant turn.
        continues: leave the turn of the last message open, instead of beginning another one. None: that of a final
            assistant message, as llama-server does, if ``add_generation_prompt``.
        extra: further variables of the template (``tools``, ``documents``, ``enable_thinking``, ...); plain data.
    """

    template: str
    messages: tuple[Message, ...]
    bos_token: str = ""
    eos_token: str = ""
    special_tokens: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    continues: bool | None = None
    extra: dict[str, Any] = {}

    @classmethod
    def of(cls, info: ModelInfo, template: str, messages: tuple[Message, ...], **options: Any) -> ChatPrompt:
        """Return a chat with the control tokens of a model; ``options`` are further attributes."""
        return cls(
            template=template,
            messages=messages,
            bos_token=info.bos_token,
            eos_token=info.eos_token,
            special_tokens=tuple(info.special_tokens),
            **options,
        )


class ModelTemplates:
    """The chat templates of all configured models.

    Args:
        models: model settings by name.

    Raises:
        ConfigError: a template file cannot be read.
    """

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._of_settings = {name: _read_template(name, model) for name, model in models.items()}

    def all(self, model: str, info: ModelInfo) -> Mapping[str, str]:
        """Return all templates that may be used, by name; empty if the plain fallback is used."""
        named = self._of_settings.get(model)
        return {"chat_template": named} if named else {name: text for name, text in info.chat_templates.items() if text}

    def choose(self, model: str, info: ModelInfo, *, with_tools: bool) -> str:
        """Return the template of a chat; some models have a separate one for chats with tools."""
        named = self._of_settings.get(model)
        for_tools = info.chat_templates.get("tool_use") if with_tools else None
        own = named or for_tools or info.chat_templates.get("default")
        return own or fallback_template(info.special_tokens)


_MAX_TEMPLATE_BYTES = 4 * 2**20


def _read_template(name: str, model: ModelSettings) -> str | None:
    """Read the chat template file named in the settings."""
    if model.chat_template is None:
        return None
    try:
        return read_regular_text(Path(model.chat_template).expanduser(), _MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        path = f"models.{name}.chat_template"
        raise ConfigError(f"{path}: cannot read {model.chat_template!r}: {error}", path) from error
