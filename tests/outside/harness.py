"""LangChain's standard suite for chat models, as the tests of its clients run it: on the small model, and on a script.

The suite is the judge: nothing of it is changed but for the cases that ask for a more able model than one of 135
million parameters. What is greedy fails every time, so these are strict.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from .conftest import Served

__all__ = ["MARKS", "ScriptedSuite", "StarterSuite"]

MARKS = [
    pytest.mark.slow,
    pytest.mark.llamacpp,
    pytest.mark.llguidance,
    # LangChain's own: a class of Pydantic 1 becomes a call in the place of a schema; what it dumps is parsed already.
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

_BOTH_OUTPUT_VERSIONS = pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)


class _Suite(ChatModelIntegrationTests):
    """The suite against the server; subclasses name the client and its parameters."""

    served: Served

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, served: Served) -> None:
        cls.served = served

    @property
    @abstractmethod
    def client_params(self) -> dict[str, Any]:
        """The client's parameters but for the name of the model."""

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return self.served.thinker


class StarterSuite(_Suite):
    """With SmolLM2: greedy, with a limit for a model that likes to repeat itself."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.client_params, "model": self.served.starter}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @_BOTH_OUTPUT_VERSIONS
    @pytest.mark.xfail(reason="Nothing forces the call: asked for the weather, a model of this size talks.")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)


class ScriptedSuite(_Suite):
    """With a script that calls the suite's tools. It follows no constraint: no forced call, no schema, no JSON mode."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**self.client_params, "model": self.served.caller}

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return False
