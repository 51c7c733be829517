"""Trial of a chat template when its model is loaded: problems with chats and images are reported before any request.

Called by the pipeline for each loaded model, and by ``enginehouse doctor`` for templates in files.
"""

from __future__ import annotations

import asyncio
from typing import Any

from enginehouse.contract.errors import RenderError, ServerOverloaded
from enginehouse.contract.types import DecodedImage, Message, ModelInfo
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.renderer import Renderer

_SLOW_S = 1.0
_USER = Message(role="user", content="Hello")
_SYSTEM = Message(role="system", content="Be brief.")
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Name."}}}
_FUNCTION = {"name": "weather", "description": "Return the weather.", "parameters": _PARAMETERS}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_CHATS: tuple[tuple[tuple[Message, ...], dict[str, Any]], ...] = (
    ((_USER,), {}),
    ((_USER,), _TOOLS),
    ((_SYSTEM, _USER), {}),
    ((_SYSTEM, _USER), _TOOLS),
)


async def find_template_problem(renderer: Renderer, template: str, info: ModelInfo) -> str:
    """Return why a template renders none of four short chats, by the first of them; "" if it renders one.

    After a chat that takes long no other is tried, as such a template costs a process each time.
    """
    problem = ""
    for messages, variables in _CHATS:
        began = asyncio.get_running_loop().time()
        prompt = ChatPrompt.of(info, template, messages, extra=variables)
        try:
            await renderer.render(prompt)
        except RenderError as error:
            problem = problem or error.message
        except ServerOverloaded:  # the processes are needed by requests
            return ""
        else:
            return ""
        if asyncio.get_running_loop().time() - began > _SLOW_S:
            break
    return problem


async def find_image_problem(renderer: Renderer, template: str, info: ModelInfo) -> str:
    """Return why a template cannot render a chat with an image; "" if it can."""
    image = DecodedImage("", 1, 1, b"", param="image")
    asked = Message(role="user", content=_USER.content, parts=(image, _USER.content))
    try:
        await renderer.render(ChatPrompt.of(info, template, (asked,)))
    except RenderError as error:
        return error.message.removeprefix("image: ")
    except ServerOverloaded:  # the processes are needed by requests
        return ""
    return ""
