"""LangChain's standard suite: `ChatAnthropic` against the Messages API."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel

from .harness import MARKS, ScriptedSuite, StarterSuite

pytestmark = MARKS


class _OverMessages:
    """The client."""

    served: Any

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def client_params(self) -> dict[str, Any]:
        return {
            "base_url": self.served.url,
            "api_key": "unused",
            "temperature": 0,
            "max_tokens": 300,
            "max_retries": 0,
        }


class TestChatAnthropic(_OverMessages, StarterSuite):
    """With the small model."""

    @property
    def supports_json_mode(self) -> bool:
        return False  # the client has no such method


class TestChatAnthropicScripted(_OverMessages, ScriptedSuite):
    """With the script."""
