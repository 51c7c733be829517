"""What must be known to render a chat; crosses the pipe to the rendering processes."""

from __future__ import annotations

from typing import Any

import msgspec

from enginehouse.contract.types import Message

__all__ = ["ChatPrompt"]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages and the template that turns them into a prompt.

    Roles come from a closed set that the caller has checked. Every other string in ``messages`` and
    ``extra`` is untrusted: control-token strings in it stay ordinary text.

    Attributes:
        template: Jinja source.
        special_tokens: all control-token strings of the model.
        add_generation_prompt: end with the beginning of an assistant turn. A last message by the assistant
            is then continued instead (its turn is left open), as llama-server does.
        extra: further variables of the template (``tools``, ``documents``, ``enable_thinking``, ...); plain data.
    """

    template: str
    messages: tuple[Message, ...]
    bos_token: str = ""
    eos_token: str = ""
    special_tokens: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    extra: dict[str, Any] = {}
