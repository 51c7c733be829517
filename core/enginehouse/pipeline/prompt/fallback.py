"""Chat templates for models that come without one.

Called by the pipeline when a model is loaded. Which of three forms is used follows from the
control-token strings in the model's vocabulary:

* ``<|im_start|>``: ChatML, as Qwen and SmolLM2 use it.
* ``<start_of_turn>``: Gemma's turns; system text goes in front of the first user message. The Gemma 3
  270M base model has these tokens, though no template.
* otherwise: ``User:`` and ``Assistant:`` lines, which a model never trained on chats may still continue.
  It may also go on with the user's next line; requests can give ``"stop": ["\\nUser:"]``.

Each begins with the model's begin-of-sequence text, if it has one that such models expect.
"""

from __future__ import annotations

from collections.abc import Container

__all__ = ["CHATML", "GEMMA", "PLAIN", "fallback_template"]

# Qwen's and SmolLM2's files name a begin-of-sequence token, but their own templates do not write it.
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
    """The template for a model without one.

    Args:
        special_tokens: its control-token strings (:attr:`enginehouse.contract.types.ModelInfo.special_tokens`).
    """
    if "<|im_start|>" in special_tokens:
        return CHATML
    if "<start_of_turn>" in special_tokens:
        return GEMMA
    return PLAIN
