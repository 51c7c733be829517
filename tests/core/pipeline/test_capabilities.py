"""What becomes of each parameter is decided by what really decides: engine, template, parsers, plugins."""

from __future__ import annotations

from typing import Any

import pytest

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
    find_unsupported,
    without_parameters,
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

    assert find_unsupported(request, refused) == ((param, "for a reason"),)
    assert find_unsupported(request, {param: Capability("emulated")}) == ()
    assert find_unsupported(GenerateRequest(request_id="r", model=None), refused) == ()


LENIENT, STRICT = (
    Tool(name="f", parameters={}, definition={}, strict=strict, param="tools[0].function") for strict in (False, True)
)
ANSWER = Constraint(kind="json_object", param="response_format")
LARK = Constraint(kind="lark", text="start: /a/", param="structured_outputs.grammar")


@pytest.mark.parametrize(
    ("fields", "unsupported"),
    [
        ({"tool_use": ToolUse(tools=(LENIENT,))}, []),
        ({"tool_use": ToolUse(tools=(LENIENT,), choice="required")}, ["tool_choice"]),
        ({"tool_use": ToolUse(tools=(STRICT,))}, ["tools[0].function.strict"]),
        ({"tool_use": ToolUse(tools=(STRICT,), choice="required")}, ["tool_choice", "tools[0].function.strict"]),
        ({"tool_use": ToolUse(tools=(STRICT,), choice="none"), "constraint": ANSWER}, []),
        ({"tool_use": ToolUse(tools=(LENIENT,)), "constraint": ANSWER}, ["response_format"]),
        ({"constraint": ANSWER}, []),
        ({"constraint": LARK}, ["structured_outputs.grammar"]),
    ],
)
def test_decoder_that_enforces_answers_but_no_calls(fields: dict[str, Any], unsupported: list[str]) -> None:
    """Everything that the engine would refuse is found before it is asked."""
    kinds = ("json_object", "json_schema", "choice")
    known = capabilities(EngineCapabilities(constraint_kinds=kinds, constraint_problem="no decoder"), TOOLS)
    request = GenerateRequest(request_id="r", model=None, **fields)

    found = find_unsupported(request, known)
    assert [param for param, _ in found] == unsupported
    assert all(reason in ("no decoder (composition)", "no decoder (lark)") for _, reason in found)
    assert find_unsupported(request, capabilities(template=TOOLS)) == ()


def test_format_that_cannot_check_calls_of_the_model_s_own_choice() -> None:
    """A call that looks like text cannot be told from an answer: its arguments are enforced in required calls only."""
    known = capabilities(template="<|python_start|>{{ tools }}<|python_end|>")
    strict, required = (
        GenerateRequest(request_id="r", model=None, tool_use=ToolUse(tools=(STRICT,), choice=choice))
        for choice in ("auto", "required")
    )

    ((param, reason),) = find_unsupported(strict, known)
    assert param == "tools[0].function.strict" and reason.startswith("this model's calls can only be checked")
    assert find_unsupported(required, known) == ()


def test_engine_that_takes_messages_gets_strict_tools() -> None:
    engine = EngineCapabilities(takes_messages=True, native=("tools", "tool_choice", "response_format"))
    use = ToolUse(tools=(STRICT,), choice="required")

    assert find_unsupported(GenerateRequest(request_id="r", model=None, tool_use=use), capabilities(engine)) == ()


# -- leaving out --------------------------------------------------------------------------------------

STRICT_USE = ToolUse(tools=(Tool(name="f", parameters={}, definition={}, strict=True),))
LENIENT_USE = ToolUse(tools=(Tool(name="f", parameters={}, definition={}),))
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
        ({"tool_use": LENIENT_USE}, "tools", {}, "tools"),
        ({"tool_use": required(LENIENT_USE)}, "tool_choice", {"tool_use": LENIENT_USE}, "tool_choice"),
        ({"tool_use": STRICT_USE}, "tools[0].function.strict", {"tool_use": LENIENT_USE}, "tools[0].function.strict"),
        (
            {"tool_use": ToolUse(tools=LENIENT_USE.tools, parallel=False)},
            "parallel_tool_calls",
            {"tool_use": LENIENT_USE},
            "parallel_tool_calls",
        ),
    ],
)
def test_without(before: dict[str, Any], param: str, after: dict[str, Any], left_out: str) -> None:
    assert without_parameters(request(**before), [param]) == (request(**after), (left_out,))


def test_without_several() -> None:
    before = request(constraint=SCHEMA, sampling={"min_p": 0.1}, tool_use=required(STRICT_USE))
    after = request(tool_use=LENIENT_USE)
    params = ("min_p", "tool_choice", "tools[0].function.strict", "response_format.json_schema")

    assert without_parameters(before, params) == (after, (*params[:3], "response_format"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages[0].content[1]"),
        ({}, "prompt"),
        ({}, "min_p"),
        ({"tool_use": LENIENT_USE}, "tool_choice"),
        ({"tool_use": LENIENT_USE}, "parallel_tool_calls"),
        ({"tool_use": LENIENT_USE}, "tools[0].function.strict"),
    ],
)
def test_what_cannot_be_left_out(fields: dict[str, Any], param: str) -> None:
    assert without_parameters(request(**fields), [param]) == (request(**fields), ())


def given(asked: GenerateRequest) -> set[str]:
    """The names that a model would refuse which honours nothing, or nothing but tools."""
    nothing = dict.fromkeys(capabilities(), Capability("refused", "why"))
    but_tools = nothing | {"tools": Capability("emulated")}
    return {name for known in (nothing, but_tools) for name, _ in find_unsupported(asked, known)}


def test_what_only_some_engines_take_is_given_by_the_names_that_clients_write() -> None:
    use = ToolUse(tools=LENIENT_USE.tools, choice="required", parallel=False)
    asked = request(
        tool_use=use,
        template_variables={"a": 1},
        thinking=Thinking(enabled=False, budget=3, effort="low"),
        num_choices=2,
        prediction="x",
    )

    assert given(asked) == {
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
    hidden = ToolUse(tools=LENIENT_USE.tools, choice="none")

    assert given(request(tool_use=hidden)) == set()
    assert given(request(tool_use=LENIENT_USE)) == {"tools"}
