"""All checks of each API in order. Those of chats omit H20 and H23 to H26: they need knowledge of server and model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from enginehouse_conform import (
    embeddings_api,
    lifetime,
    messages,
    messages_api,
    ollama_api,
    protocol,
    responses_api,
    sampling,
    stopping,
    streaming,
    structured,
    tools,
)
from enginehouse_conform.check import Check

__all__ = ["CHECKS", "CHECKS_BY_API"]

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            *streaming.CHECKS,
            *stopping.CHECKS,
            *sampling.CHECKS,
            *tools.CHECKS,
            *structured.CHECKS,
            *messages.CHECKS,
            *protocol.CHECKS,
            *lifetime.CHECKS,
        ),
        key=lambda check: check.behaviour,
    )
)
"""Those of OpenAI's chats and text completions."""

CHECKS_BY_API: Mapping[str, tuple[Check, ...]] = MappingProxyType(
    {
        "chat": CHECKS,
        "responses": responses_api.CHECKS,
        "messages": messages_api.CHECKS,
        "ollama": ollama_api.CHECKS,
        "embeddings": embeddings_api.CHECKS,
    }
)
