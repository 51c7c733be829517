"""What becomes of each parameter is decided by what really decides: engine, template, parsers, plugins."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.types import (
    Constraint,
    EngineCapabilities,
    EngineSettings,
    GenerateRequest,
    ModelInfo,
    Thinking,
    Tool,
    ToolUse,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.pipeline.capabilities import (
    Capability,
    Deciders,
    capabilities_of,
    check_parameters,
    find_unsupported,
    without_parameter,
)
from enginehouse.pipeline.chat_formats import ChatFormats, ModelFormats
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse_testkit.fake_runner import FakeRunner

REGISTRY = PluginRegistry.load(PluginsSettings(allow=("samplers", "parsers", "llguidance")))
ALL_KINDS = ("choice", "composition", "gbnf", "json_object", "json_schema", "lark", "regex")
TOOLS = '{% if tools %}<tool_call>\n{"name": 1}</tool_call>{% endif %}'
THINKING = "{% if enable_thinking %}<think>{% endif %}{{ reasoning_effort }}</think>"


def formats(template: str) -> ModelFormats:
    return ChatFormats(REGISTRY, {"m": ModelSettings(source="x")}).of("m", ChatFormat(template))


def capabilities(
    engine: EngineCapabilities | None = None,
    template: str = "plain",
    found: ModelFormats | None = None,
    *,
    has_template: bool = True,
    **info: Any,
) -> dict[str, Capability]:
    engine = engine or EngineCapabilities(constraint_kinds=ALL_KINDS)
    deciders = Deciders(
        info=ModelInfo(backend="b", max_context=9, vocab_size=9, engine=engine, **info),
        formats=found or formats(template),
        has_template=has_template,
        plugin_fields=REGISTRY.request_fields,
    )
    return capabilities_of(deciders)


def supports(known: dict[str, Capability], *names: str) -> list[str]:
    return [known[name].support for name in names]


# -- the table ----------------------------------------------------------------------------------------


def test_every_refusal_and_every_emulation_says_why() -> None:
    for engine in (EngineCapabilities(), EngineCapabilities(samplers=())):
        assert all(capability.reason for capability in capabilities(engine).values())


@pytest.mark.llguidance
def test_core_s_engine_says_what_it_has(tmp_path) -> None:
    with_plugins = StepEngine(
        FakeRunner(), EngineSettings(), REGISTRY.samplers, REGISTRY.structured_decoders.values()
    ).capabilities
    bare = StepEngine(FakeRunner(), EngineSettings(), {}).capabilities

    assert with_plugins.samplers == tuple(sorted(REGISTRY.samplers))
    assert set(with_plugins.constraint_kinds) == set(ALL_KINDS)
    assert bare.samplers == () and bare.constraint_kinds == ()
    assert "pip install" in bare.constraint_problem


# -- what decides -------------------------------------------------------------------------------------


def test_drawing_is_core_s_unless_the_engine_says_otherwise() -> None:
    engine = EngineCapabilities(native=("temperature", "stop"), refused={"min_p": "no such thing upstream"})
    known = capabilities(engine)

    assert supports(known, "temperature", "stop", "top_p", "max_tokens") == ["native", "native", "emulated", "emulated"]
    assert known["min_p"] == Capability("refused", "no such thing upstream")


def test_plugin_fields_need_the_plugin_where_the_model_runs() -> None:
    name, field = next(iter(REGISTRY.request_fields.items()))

    assert capabilities()[name].support == "emulated"
    assert capabilities(EngineCapabilities(samplers=(field.owner,)))[name].support == "emulated"
    assert capabilities(EngineCapabilities(samplers=("other",)))[name].support == "refused"


def test_constraints_need_a_decoder_of_their_kind() -> None:
    none = capabilities(EngineCapabilities(constraint_problem="no decoder"))
    regex = capabilities(EngineCapabilities(constraint_kinds=("regex",), constraint_problem="only that"))

    names = ("response_format", "json_schema", "guided_regex", "guided_choice", "grammar", "structured_outputs")
    assert supports(none, *names) == ["refused"] * 6
    assert none["response_format"].reason == "no decoder"
    assert supports(regex, *names) == ["refused", "refused", "emulated", "refused", "refused", "emulated"]
    assert "'auto' and 'none' only" in none["tool_choice"].reason


def test_tools_are_native_where_the_template_shows_them() -> None:
    assert capabilities(template=TOOLS)["tools"].support == "native"
    assert "'hermes'" in capabilities(template=TOOLS)["tools"].reason
    assert capabilities(template="plain")["tools"].support == "emulated"
    without = capabilities(found=ModelFormats(None, None))
    assert supports(without, "tools", "tool_choice", "parallel_tool_calls") == ["refused"] * 3


def test_reasoning_needs_a_model_that_reasons() -> None:
    names = ("enable_thinking", "reasoning_effort", "thinking_budget")

    assert supports(capabilities(template=THINKING), *names) == ["native", "native", "emulated"]
    assert supports(capabilities(template="<think>"), *names) == ["emulated", "accepted", "emulated"]
    assert supports(capabilities(template="plain"), *names) == ["accepted"] * 3


def test_templates_and_infill_tokens() -> None:
    bare = capabilities(has_template=False)

    assert supports(capabilities(), "messages", "chat_template_kwargs", "suffix") == ["native", "native", "refused"]
    assert supports(bare, "messages", "chat_template_kwargs") == ["emulated", "accepted"]
    assert capabilities(infill_tokens=("<p>", "<s>", "<m>"))["suffix"].support == "native"


# -- refusing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("min_p", {"sampling": {"min_p": 0.1}}),
        ("ignore_eos", {"stopping": {"ignore_eos": True}}),
        ("logprobs", {"sampling": {"num_logprobs": 1}}),
        ("typical_p", {"extensions": {"typical_p": {"typical_p": 0.5}}}),
        ("tools", {"tool_use": ToolUse(tools=(Tool(name="f", parameters={}, definition={}),))}),
        ("guided_regex", {"constraint": Constraint(kind="regex", text="a", param="guided_regex")}),
        ("structured_outputs", {"constraint": Constraint(kind="regex", text="a", param="structured_outputs.regex")}),
        ("suffix", {"text": "a", "suffix": "b"}),
        ("prompt_logprobs", {"num_prompt_logprobs": 1}),
    ],
)
def test_what_is_refused_is_named_with_the_reason(param: str, fields: dict[str, Any]) -> None:
    request = GenerateRequest(request_id="r", model=None, **fields)
    refused = {param: Capability("refused", "for a reason")}

    with pytest.raises(UnsupportedParameter, match=f"^{param}: for a reason$") as caught:
        check_parameters(request, refused)
    assert caught.value.param == param
    check_parameters(request, {param: Capability("emulated")})
    check_parameters(GenerateRequest(request_id="r", model=None), refused)


# -- leaving out --------------------------------------------------------------------------------------

STRICT = ToolUse(tools=(Tool(name="f", parameters={}, definition={}, strict=True),))
LENIENT = ToolUse(tools=(Tool(name="f", parameters={}, definition={}),))
SCHEMA = Constraint(kind="json_object", param="response_format")


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", model=None, **fields)


def required(use: ToolUse) -> ToolUse:
    return ToolUse(tools=use.tools, choice="required", only="f")


@pytest.mark.parametrize(
    ("before", "param", "after", "left_out"),
    [
        ({"constraint": SCHEMA}, "response_format", {}, "response_format"),
        ({"sampling": {"min_p": 0.1, "top_k": 1}}, "min_p", {"sampling": {"top_k": 1}}, "min_p"),
        ({"sampling": {"num_logprobs": 1}}, "logprobs", {"sampling": {}}, "logprobs"),
        ({"stopping": {"stop": ("a",)}}, "stop", {"stopping": {}}, "stop"),
        ({"extensions": {"x": {"a": 1, "b": 2}}}, "a", {"extensions": {"x": {"b": 2}}}, "a"),
        ({"extensions": {"x": {"a": 1}}}, "a", {}, "a"),
        ({"suffix": "x"}, "suffix", {}, "suffix"),
        ({"num_prompt_logprobs": 1}, "loglikelihood", {}, "loglikelihood"),
        ({"prediction": "x"}, "prediction", {}, "prediction"),
        ({"template_variables": {"a": 1}}, "chat_template_kwargs", {}, "chat_template_kwargs"),
        (
            {"thinking": Thinking(enabled=True, budget=5)},
            "thinking_budget",
            {"thinking": Thinking(enabled=True)},
            "thinking_budget",
        ),
        ({"tool_use": LENIENT}, "tools", {}, "tools"),
        ({"tool_use": required(LENIENT)}, "tool_choice", {"tool_use": LENIENT}, "tool_choice"),
        ({"tool_use": STRICT}, "tools[0].function.strict", {"tool_use": LENIENT}, "tools[0].function.strict"),
        (
            {"tool_use": ToolUse(tools=LENIENT.tools, parallel=False)},
            "parallel_tool_calls",
            {"tool_use": LENIENT},
            "parallel_tool_calls",
        ),
        # The two make one constraint, which is named after the tools.
        ({"tool_use": LENIENT, "constraint": SCHEMA}, "tool_choice", {"tool_use": LENIENT}, "response_format"),
    ],
)
def test_without(before: dict[str, Any], param: str, after: dict[str, Any], left_out: str) -> None:
    assert without_parameter(request(**before), param) == (request(**after), left_out)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages[0].content[1]"),
        ({}, "prompt"),
        ({}, "min_p"),
        ({"tool_use": LENIENT}, "tool_choice"),
        ({"tool_use": LENIENT}, "parallel_tool_calls"),
        ({"tool_use": LENIENT}, "tools[0].function.strict"),
    ],
)
def test_what_cannot_be_left_out(fields: dict[str, Any], param: str) -> None:
    """None, and no loop: whoever leaves out again and again must come to an end."""
    assert without_parameter(request(**fields), param) is None


def given(asked: GenerateRequest) -> list[str]:
    """The names that a model which honours nothing would refuse."""
    nothing = dict.fromkeys(capabilities(), Capability("refused", "why"))
    return [name for name, reason in find_unsupported(asked, nothing) if reason == "why"]


def test_what_only_some_engines_take_is_given_by_the_names_that_clients_write() -> None:
    use = ToolUse(tools=LENIENT.tools, choice="required", parallel=False)
    asked = request(
        tool_use=use,
        template_variables={"a": 1},
        thinking=Thinking(enabled=False, budget=3, effort="low"),
        num_choices=2,
        prediction="x",
    )

    assert set(given(asked)) == {
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "enable_thinking",
        "thinking_budget",
        "reasoning_effort",
        "n",
        "prediction",
    }


def test_hidden_tools_are_not_given() -> None:
    hidden = ToolUse(tools=LENIENT.tools, choice="none")

    assert given(request(tool_use=hidden)) == []
    assert given(request(tool_use=LENIENT)) == ["tools"]
