"""Renders the example chats of the contract with a model's template, for parsers that derive formats from it.

Called when a model is loaded. Does not know formats.
"""

from __future__ import annotations

import asyncio

from enginehouse.contract.errors import InvalidRequest, RenderError, ServerOverloaded
from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.template_examples import EXAMPLES, Example
from enginehouse.contract.types import ModelInfo
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.renderer import Renderer

_TIMEOUT_S = 10.0  # all examples; a usual template takes some milliseconds for each


async def render_examples(renderer: Renderer, template: str, info: ModelInfo) -> ChatFormat:
    """Return the template with the texts that it writes; examples that it refuses are left out."""
    examples: dict[str, str] = {}
    failures: dict[str, str] = {}
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            for name, example in EXAMPLES.items():
                try:
                    segments = await renderer.render(_prompt(template, example, info))
                except (RenderError, InvalidRequest) as error:
                    failures[name] = error.message
                else:
                    examples[name] = "".join(segment.text for segment in segments)
    except (TimeoutError, ServerOverloaded) as error:
        failures.setdefault("", f"examples were not rendered: {error or 'they took too long'}")
    return ChatFormat(template, info.special_tokens, examples, failures)


def _prompt(template: str, example: Example, info: ModelInfo) -> ChatPrompt:
    tools = [tool.definition for tool in example.tools]
    return ChatPrompt.of(
        info,
        template,
        example.messages,
        add_generation_prompt=example.opens,
        continues=False,
        extra={**example.variables, **({"tools": tools} if tools else {})},
    )
