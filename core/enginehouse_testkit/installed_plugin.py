"""The contract suites for an installed plugin: what ``enginehouse plugins check`` hands to pytest.

``ENGINEHOUSE_CHECKED`` in the environment is JSON: the ``plugin``, and for its backends a ``model``, its ``options``
and the ``tolerance`` of logits. A suite is made for each kind of object that the plugin registers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from enginehouse.backend import Backend
from enginehouse.compression import Compressor
from enginehouse.config import PluginsSettings, structure_options
from enginehouse.drafting import Drafter
from enginehouse.early_exit import ExitPolicy
from enginehouse.identity import Identity
from enginehouse.logits_processor import LogitsProcessor
from enginehouse.models.sources import find_source
from enginehouse.parsers import ReasoningParser, ToolParser
from enginehouse.plugins import PluginRegistry
from enginehouse.router import Router
from enginehouse.sampler import SamplerPlugin
from enginehouse.structured import StructuredDecoder
from enginehouse_testkit.authenticator_contract import AuthenticatorContract
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.compressor_contract import CompressorContract
from enginehouse_testkit.drafter_contract import DrafterContract
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.exit_policy_contract import ExitPolicyContract
from enginehouse_testkit.logits_processor_contract import LogitsProcessorContract
from enginehouse_testkit.reasoning_parser_contract import ReasoningParserContract
from enginehouse_testkit.router_contract import RouterContract
from enginehouse_testkit.runner_contract import RunnerContract
from enginehouse_testkit.sampler_contract import SamplerContract
from enginehouse_testkit.structured_decoder_contract import StructuredDecoderContract
from enginehouse_testkit.tool_parser_contract import ToolParserContract

__all__ = ["test_the_plugin_registers_something"]

_CHECKED: dict[str, Any] = json.loads(os.environ["ENGINEHOUSE_CHECKED"])
_REGISTRY = PluginRegistry.load(PluginsSettings(allow=(_CHECKED["plugin"],)))

_SAMPLERS = {name: one for name, one in _REGISTRY.samplers.items() if name not in _REGISTRY.logits_processors}


def _each(objects: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A fixture with one value for each of these objects."""
    return pytest.fixture(scope="class", params=list(objects.values()), ids=list(objects))


def test_the_plugin_registers_something() -> None:
    """It loads, and each of its hooks is one that exists."""
    (record,) = [record for record in _REGISTRY.plugins if record.name == _CHECKED["plugin"]]

    assert record.error is None
    assert record.hooks


if _REGISTRY.backends:

    class TestBackend(BackendContract):
        """What the plugin registers."""

        @_each(_REGISTRY.backends)
        @staticmethod
        def model(request: pytest.FixtureRequest) -> ModelUnderTest:
            """A backend with the model of the command line."""
            return _model_of(request.param)

    if any(backend.opens == "runner" for backend in _REGISTRY.backends.values()):

        class TestRunner(RunnerContract):
            """What it opens."""

            max_logit_difference = _CHECKED["tolerance"]

            @_each({name: one for name, one in _REGISTRY.backends.items() if one.opens == "runner"})
            @staticmethod
            def model(request: pytest.FixtureRequest) -> ModelUnderTest:
                """A backend with the model of the command line."""
                return _model_of(request.param)

    class TestEngine(EngineContract):
        """How requests fare on it."""

        @_each(_REGISTRY.backends)
        @staticmethod
        def model(request: pytest.FixtureRequest) -> ModelUnderTest:
            """A backend with the model of the command line."""
            return _model_of(request.param)


if _SAMPLERS:

    class TestSampler(SamplerContract):
        """Each sampler, switched on by values that its validators allow."""

        @_each(_SAMPLERS)
        @staticmethod
        def sampler(request: pytest.FixtureRequest) -> SamplerPlugin:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.routers:

    class TestRouter(RouterContract):
        """Each router."""

        @_each(_REGISTRY.routers)
        @staticmethod
        def router(request: pytest.FixtureRequest) -> Router:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.compressors:

    class TestCompressor(CompressorContract):
        """Each compressor."""

        @_each(_REGISTRY.compressors)
        @staticmethod
        def compressor(request: pytest.FixtureRequest) -> Compressor:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.structured_decoders:

    class TestStructuredDecoder(StructuredDecoderContract):
        """Each decoder."""

        @_each(_REGISTRY.structured_decoders)
        @staticmethod
        def decoder(request: pytest.FixtureRequest) -> StructuredDecoder:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.logits_processors:

    class TestLogitsProcessor(LogitsProcessorContract):
        """Each processor, switched on by values that its validators allow."""

        @_each(_REGISTRY.logits_processors)
        @staticmethod
        def processor(request: pytest.FixtureRequest) -> LogitsProcessor:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.drafters:

    class TestDrafter(DrafterContract):
        """Each drafter, with the settings that it has by itself."""

        uses_second_model = True

        @_each(_REGISTRY.drafters)
        @staticmethod
        def drafter(request: pytest.FixtureRequest) -> Drafter:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.exit_policies:

    class TestExitPolicy(ExitPolicyContract):
        """Each policy, with the settings that it has by itself."""

        @_each(_REGISTRY.exit_policies)
        @staticmethod
        def exit_policy(request: pytest.FixtureRequest) -> ExitPolicy:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.tool_parsers:

    class TestToolParser(ToolParserContract):
        """Each parser, bound to a model whose template says nothing."""

        @_each(_REGISTRY.tool_parsers)
        @staticmethod
        def tool_parser(request: pytest.FixtureRequest) -> ToolParser:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.reasoning_parsers:

    class TestReasoningParser(ReasoningParserContract):
        """Each parser, bound to a model whose template says nothing."""

        @_each(_REGISTRY.reasoning_parsers)
        @staticmethod
        def reasoning_parser(request: pytest.FixtureRequest) -> ReasoningParser:
            """One of them."""
            return request.param  # type: ignore[no-any-return]


if _REGISTRY.authenticators:

    class TestAuthenticator(AuthenticatorContract):
        """What it does with callers whom it cannot know."""

        @_each(_REGISTRY.authenticators)
        @staticmethod
        def ask(request: pytest.FixtureRequest) -> Callable[..., Identity | None]:
            """The hook."""
            return request.param.ask  # type: ignore[no-any-return]


def _model_of(backend: Backend) -> ModelUnderTest:
    """The model of the command line, with a short context and few slots unless the options say otherwise."""
    known = {attribute.name for attribute in attrs.fields(backend.options)}
    small = {name: value for name, value in (("context", 128), ("slots", 4)) if name in known}
    options = structure_options(backend.options, {**small, **_CHECKED["options"]}, "options")
    offered = PluginRegistry.load(PluginsSettings()).model_sources
    return ModelUnderTest(backend=backend, source=find_source(_CHECKED["model"], offered), options=options)
