"""LangChain's standard suite: `ChatOpenAI` against chats and the Responses API."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from .harness import MARKS, ScriptedSuite, StarterSuite

pytestmark = MARKS


class _OverChats:
    """The client of chats; a penalty for a model that likes to repeat itself."""

    served: Any

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def client_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{self.served.url}/v1",
            "api_key": "unused",
            "temperature": 0,
            "frequency_penalty": 1,
            "max_tokens": 300,
            "max_retries": 0,
            "stream_usage": True,
        }


class _OverResponses(_OverChats):
    """The Responses API, which has no frequency penalty in LangChain's parameters."""

    @property
    def client_params(self) -> dict[str, Any]:
        shared = {name: value for name, value in super().client_params.items() if name != "frequency_penalty"}
        return {**shared, "use_responses_api": True, "extra_body": {"frequency_penalty": 1}}


class TestChatOpenAI(_OverChats, StarterSuite):
    """Chats with the small model."""


class TestChatOpenAIScripted(_OverChats, ScriptedSuite):
    """Chats with the script."""


class TestChatOpenAIResponses(_OverResponses, StarterSuite):
    """Responses of the small model."""


class TestChatOpenAIResponsesScripted(_OverResponses, ScriptedSuite):
    """Responses of the script."""
