"""Group F: tools, their choice, streamed calls, and turns that hold calls and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

from .client import ASK, LAMP, Server, Stream, check_client_error, named, pairs, streamed_calls, tool
from .conftest import ON_BACKENDS


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def check_call(message: dict[str, Any], names: set[str], schema: Any = LAMP) -> None:
    assert message["content"] in (None, "")
    assert message["tool_calls"]
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    for call in message["tool_calls"]:
        assert call["type"] == "function" and call["id"] and call["function"]["name"] in names
        assert isinstance(call["function"]["arguments"], str)
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


# -- servers ------------------------------------------------------------------------------------------

MARKED = {
    "fake_with_decoder": pytest.mark.llguidance,
    **{kind: (marker, pytest.mark.llguidance) for kind, marker in ON_BACKENDS.items()},
}


def _fake(folder: Path, *plugins: str) -> Settings:
    model = ModelSettings(source=str(folder), backend="fake", isolation="thread", context=50_000)
    return Settings(models={"fake": model}, plugins=PluginsSettings(allow=plugins))


def _connected(url: str, model: str) -> Generator[Server, None, None]:
    server = Server.connect(url, model)
    with server.client:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def fake_with_decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_thread(_fake(tmp_path_factory.mktemp("fake"), "parsers", "llguidance")) as running:
        yield from _connected(running.url, "fake")


@pytest.fixture(scope="session")
def fake_with_parsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No structured decoder is installed."""
    with server_thread(_fake(tmp_path_factory.mktemp("fake"), "parsers")) as running:
        yield from _connected(running.url, "fake")


@pytest.fixture(scope="session", params=[pytest.param(name, marks=marks) for name, marks in MARKED.items()])
def enforcing(request: pytest.FixtureRequest) -> Server:
    """A model that computes, and a structured decoder."""
    return request.getfixturevalue(request.param)


ODD = 'He said: "{x} [y] \\\\ \\" }" and </tool_call>, 🧑🏽\u200d🚀'
ODD_CALL = json.dumps({"name": "say", "arguments": {"text": ODD, "more": {"a": {"b": [1, {}]}}}}, ensure_ascii=False)
SAY = tool("say", {"type": "object"})


def _pieces(text: str, size: int) -> list[dict[str, Any]]:
    data = text.encode()
    return [{"bytes": list(data[start : start + size])} for start in range(0, len(data), size)]


@pytest.fixture(scope="session")
def tool_scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Call it with the name of a model that always says the same."""
    folder = tmp_path_factory.mktemp("scripts")
    call = f"<tool_call>\n{ODD_CALL}\n</tool_call>"
    two = 'Wait.\n<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>\n'
    scripts = {
        "bytes": write_script(folder / "bytes.json", _pieces(call, 1)),
        "threes": write_script(folder / "threes.json", _pieces(call, 3)),
        "fours": write_script(folder / "fours.json", _pieces(call, 3), tokens_per_step=4),
        "whole": write_script(folder / "whole.json", [call]),
        "two": write_script(folder / "two.json", _pieces(two, 5)),
        "words": write_script(folder / "words.json", [f" word{n}" for n in range(60)]),
        "unknown": write_script(folder / "unknown.json", _pieces(call.replace('"say"', '"shout"'), 7)),
        "broken": write_script(folder / "broken.json", _pieces(call[: call.index("</tool_call>")] + "...", 7)),
    }
    models = {name: ModelSettings(source=source, backend="scripted") for name, source in scripts.items()}
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=("parsers",)))) as running:
        connected = _connected(running.url, "bytes")
        client = next(connected).client
        yield lambda model: Server(client, model)
        connected.close()


# -- H14 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", named(), named("other")])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "seed": 5}, {"parallel_tool_calls": False}])
def test_h14_calls_are_enforced(enforcing: Server, choice: Any, fields: dict[str, Any]) -> None:
    names = {"set_lamp", "other"} if choice == "required" else {choice["function"]["name"]}
    body = {"messages": ASK, "tools": [tool(), tool("other")], "tool_choice": choice, "max_tokens": 1500, **fields}

    whole = enforcing.chat(**body)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    check_call(whole["message"], names)
    assert len(whole["message"]["tool_calls"]) == 1  # templates that know no tools: one, unless more are asked for
    stream = enforcing.stream_chat(**body)
    assert stream.finish_reason() == "tool_calls"
    assert stream.text() == ""
    assert pairs(streamed_calls(stream)) == pairs(whole["message"]["tool_calls"])


@pytest.mark.parametrize("names", [("other",), ("set_lamp", "files.read"), ("files.read",)])
def test_h14_only_allowed_tools_are_called(enforcing: Server, names: tuple[str, ...]) -> None:
    tools = [tool(), tool("other"), tool("files.read"), tool("files_read")]
    choice = allowed(*names, mode="required")
    for seed in range(3):
        body = {"messages": ASK, "tools": tools, "tool_choice": choice, "max_tokens": 1500, "temperature": 1.5}
        whole = enforcing.chat(**body, seed=seed)["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        check_call(whole["message"], set(names))
        stream = enforcing.stream_chat(**body, seed=seed)
        assert pairs(streamed_calls(stream)) == pairs(whole["message"]["tool_calls"])


def test_h14_a_call_that_is_not_allowed_is_no_call(tool_scripts) -> None:
    """The model calls ``say`` by itself: with ``auto`` that is text where only another function may be called."""
    fields = {"tools": [SAY, tool()], "max_tokens": 300}
    kept = tool_scripts("threes").chat(**fields, tool_choice=allowed("say"))["choices"][0]
    other = tool_scripts("threes").chat(**fields, tool_choice=allowed("set_lamp"))["choices"][0]

    assert kept["finish_reason"] == "tool_calls"
    assert other["finish_reason"] == "stop"
    assert "tool_calls" not in other["message"]


def test_h14_several_choices_are_enforced_each(enforcing: Server) -> None:
    body = {"messages": ASK, "tools": [tool()], "tool_choice": named(), "max_tokens": 400, "temperature": 1.2}
    choices = enforcing.chat(**body, n=3, seed=11)["choices"]

    for choice in choices:
        check_call(choice["message"], {"set_lamp"})
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3


def test_h14_none_hides_the_tools(enforcing: Server) -> None:
    without = enforcing.chat(messages=ASK, max_tokens=20)
    none = enforcing.chat(messages=ASK, tools=[tool()], tool_choice="none", max_tokens=20)

    assert none["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert none["choices"][0]["message"] == without["choices"][0]["message"]
    assert "tool_calls" not in none["choices"][0]["message"]


def test_h14_none_shows_no_markup_even_when_the_model_writes_it(tool_scripts) -> None:
    for name in ("bytes", "two"):
        server = tool_scripts(name)
        message = server.chat(tools=[SAY, tool("now")], tool_choice="none")["choices"][0]["message"]
        stream = server.stream_chat(tools=[SAY, tool("now")], tool_choice="none")

        assert "tool_calls" not in message and message["content"] == stream.text()
        assert "<tool_call>" not in message["content"] and streamed_calls(stream) == []


def test_h14_auto_answers_either_way(enforcing: Server) -> None:
    body = {"messages": ASK, "tools": [tool()], "max_tokens": 40}
    whole = enforcing.chat(**body)["choices"][0]["message"]

    assert whole["content"] or whole["tool_calls"]
    assert "<tool_call>" not in (whole["content"] or "")
    assert enforcing.stream_chat(**body).text() == (whole["content"] or "")


@pytest.mark.parametrize("stream", [False, True])
def test_h14_without_a_decoder_enforcing_is_refused(fake_with_parsers: Server, stream: bool) -> None:
    for choice in ("required", named()):
        response = fake_with_parsers.try_chat(tools=[tool()], tool_choice=choice, stream=stream)
        error = check_client_error(response, "tool_choice")

        assert error["code"] == "unsupported_parameter"
        assert "enginehouse[llguidance]" in error["message"]
    assert fake_with_parsers.try_chat(tools=[tool()], tool_choice="auto", max_tokens=4).status_code == 200


@pytest.mark.llguidance
def test_h14_schemas_that_cannot_be_enforced_are_refused_by_place(fake_with_decoder: Server) -> None:
    odd = {"type": "object", "properties": {"a": {"pattern": "(a)\\2"}}}
    response = fake_with_decoder.try_chat(tools=[tool(), tool("odd", odd)], tool_choice="required")

    assert "/properties/a" in check_client_error(response, "tools[1].function.parameters")["message"]


def test_h14_strict_tools_are_checked_even_when_the_model_chooses(fake_with_parsers: Server, enforcing: Server) -> None:
    body = {"messages": ASK, "tools": [tool(strict=True)], "max_tokens": 60}
    error = check_client_error(fake_with_parsers.try_chat(**body), "tools[0].function.strict")
    assert "enginehouse[llguidance]" in error["message"]

    whole = enforcing.chat(**body)["choices"][0]["message"]
    assert enforcing.stream_chat(**body).text() == (whole["content"] or "")
    for call in whole.get("tool_calls", ()):
        jsonschema.validate(json.loads(call["function"]["arguments"]), LAMP)


def test_h14_a_call_or_the_form_that_was_asked_for(enforcing: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}
    body = {
        "messages": ASK,
        "tools": [tool()],
        "response_format": form,
        "max_tokens": 400,
        "parallel_tool_calls": False,
    }
    message = enforcing.chat(**body)["choices"][0]["message"]

    if message.get("tool_calls"):
        check_call(message, {"set_lamp"})
    else:
        jsonschema.validate(json.loads(message["content"]), schema)
    check_call(enforcing.chat(**body, tool_choice="required")["choices"][0]["message"], {"set_lamp"})
    none = enforcing.chat(**body, tool_choice="none")["choices"][0]["message"]
    assert json.loads(none["content"]) == {"a": 1}


# -- H15 ----------------------------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()], "tool_choice": named("missing")}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": named(), "tools": []}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {}}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": 3}}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": 1}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [tool()], "tool_choice": allowed("set_lamp", mode="none")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
    ({"tools": [tool()], "tool_choice": allowed("a")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tools": [tool()], "tool_choice": allowed("set_lamp", "a")}, "tool_choice.allowed_tools.tools[1].function.name"),
    ({"tools": [], "tool_choice": allowed("a")}, "tool_choice.allowed_tools.tools[0].function.name"),
    *(
        (
            {"tools": [tool()], "tool_choice": {**allowed(), "allowed_tools": {"mode": "auto", "tools": wrong}}},
            "tool_ch",
        )
        for wrong in (None, 3, "set_lamp", {"a": 1}, ["set_lamp"], [3], [{"type": "custom"}], [{"type": "function"}])
    ),
    ({"tools": [tool("bad name!")]}, "tools[0].function.name"),
    ({"tools": [tool("a/b")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("grüße")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools[2].function.name"),
    ({"tools": [tool("f", "string")]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", {"type": 7})]}, "tools[0].function.parameters"),
    ({"tools": "t"}, "tools"),
    ({"tools": {"a": 1}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
    ({"tools": [tool()], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), CONTRADICTIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_h15_contradictions_are_refused(fake_with_parsers: Server, fields, param: str, stream: bool) -> None:
    check_client_error(fake_with_parsers.try_chat(**fields, stream=stream), param)
    fake_with_parsers.check_alive()


@pytest.mark.parametrize("fields", [{"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}])
def test_h15_functions_are_refused_by_name(fake_with_parsers: Server, fields) -> None:
    error = check_client_error(fake_with_parsers.try_chat(**fields), next(iter(fields)))

    assert error["code"] == "unsupported_parameter"


def test_h15_valid_forms_are_accepted(fake_with_parsers: Server) -> None:
    for fields in (
        {"tools": [tool(f"f{n}") for n in range(128)]},
        {"tools": [tool("x" * 64), tool("A-b_9")], "tool_choice": "auto"},
        {"tools": [tool(strict=True)], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": [tool("mcp.server.find"), tool("a")], "tool_choice": allowed("mcp.server.find")},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
    ):
        response = fake_with_parsers.try_chat(**fields, max_tokens=2)
        assert response.status_code == 200, response.text
        assert "x-enginehouse-ignored" not in response.headers


def test_h15_unknown_members_of_tools_are_listed(fake_with_parsers: Server) -> None:
    tools = [{**tool(), "cache_control": {}}, tool("f", examples=[])]
    response = fake_with_parsers.try_chat(tools=tools, max_tokens=2)

    assert response.headers["x-enginehouse-ignored"] == "tools[0].cache_control, tools[1].function.examples"


# -- H16 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["bytes", "threes", "fours", "whole"])
def test_h16_streamed_deltas(tool_scripts, model: str) -> None:
    """B12: nothing is lost when several tokens come at once, the last brace least of all."""
    server = tool_scripts(model)
    whole = server.chat(tools=[SAY])["choices"][0]
    stream = server.stream_chat(tools=[SAY], stream_options={"include_usage": True})

    (call,) = streamed_calls(stream)
    assert pairs([call]) == pairs(whole["message"]["tool_calls"])
    assert json.loads(call["function"]["arguments"]) == json.loads(ODD_CALL)["arguments"]
    assert stream.finish_reason() == whole["finish_reason"] == "tool_calls"
    assert stream.text() == "" and whole["message"]["content"] is None
    deltas = [d for c in stream.choices() for d in c["delta"].get("tool_calls", ())]
    assert deltas[0]["function"]["arguments"] == ""
    assert len(deltas) > (2 if model == "whole" else 8) - 1
    assert "tool_call" not in stream.body.decode().replace("tool_calls", "").replace("</tool_call>, ", "")


def test_h16_text_in_front_of_two_calls(tool_scripts) -> None:
    server = tool_scripts("two")
    whole = server.chat(tools=[tool("now")])["choices"][0]["message"]
    stream = server.stream_chat(tools=[tool("now")])

    assert whole["content"] == stream.text() == "Wait."
    assert pairs(whole["tool_calls"]) == pairs(streamed_calls(stream)) == [("now", "{}"), ("now", "{}")]
    one = server.chat(tools=[tool("now")], parallel_tool_calls=False)["choices"][0]["message"]
    assert pairs(one["tool_calls"]) == [("now", "{}")]


def test_h16_text_streams_as_usual_with_tools(tool_scripts) -> None:
    """B16: one chunk per word, as without tools, and the first one early."""
    server = tool_scripts("words")
    with_tools, without = server.stream_chat(tools=[SAY]), server.stream_chat()

    def texts(stream: Stream) -> list[str]:
        return [choice["delta"]["content"] for choice in stream.choices() if choice["delta"].get("content")]

    assert texts(with_tools) == texts(without)
    assert len(texts(with_tools)) == 60


@pytest.mark.parametrize("model", ["unknown", "broken"])
def test_h16_damaged_calls_never_fail(tool_scripts, model: str) -> None:
    server = tool_scripts(model)
    whole = server.chat(tools=[SAY])["choices"][0]
    stream = server.stream_chat(tools=[SAY])

    assert (whole["message"]["content"] or "") == stream.text()
    assert pairs(whole["message"].get("tool_calls", [])) == pairs(streamed_calls(stream))
    assert "<tool_call>" not in stream.text()


def test_h16_a_limit_inside_a_call(tool_scripts) -> None:
    """Whatever is cut, both modes say the same, and the finish reason is the limit."""
    server = tool_scripts("threes")
    for max_tokens in (1, 4, 6, 10, 15, 20, 30):
        whole = server.chat(tools=[SAY], max_tokens=max_tokens)["choices"][0]
        stream = server.stream_chat(tools=[SAY], max_tokens=max_tokens)

        assert whole["finish_reason"] == stream.finish_reason() == "length"
        assert not whole["message"]["content"] and stream.text() == ""
        assert pairs(whole["message"].get("tool_calls", [])) == pairs(streamed_calls(stream))


def test_h16_log_probabilities_are_those_of_the_text(tool_scripts) -> None:
    server = tool_scripts("two")
    whole = server.chat(tools=[tool("now")], logprobs=True)["choices"][0]
    stream = server.stream_chat(tools=[tool("now")], logprobs=True)

    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in stream.logprobs()] == ["Wait."]


def test_h16_enforced_deltas(enforcing: Server) -> None:
    schema = {"type": "object", "properties": {"text": {"const": ODD}}, "required": ["text"]}
    body = {"tools": [tool("say", schema)], "tool_choice": named("say"), "max_tokens": 300}
    stream = enforcing.stream_chat(**body)

    (call,) = streamed_calls(stream)
    assert json.loads(call["function"]["arguments"]) == {"text": ODD}
    assert pairs([call]) == pairs(enforcing.chat(**body)["choices"][0]["message"]["tool_calls"])
    assert sum(bool(choice["delta"].get("tool_calls")) for choice in stream.choices()) > 2


def test_h16_openai_client(tool_scripts) -> None:
    server = tool_scripts("fours")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    events = []
    with client, client.chat.completions.stream(model="fours", messages=ASK, tools=[SAY]) as stream:
        for event in stream:
            events.append(event.type)
        call = stream.get_final_completion().choices[0].message.tool_calls[0]

    assert events.count("tool_calls.function.arguments.delta") > 3
    assert events.count("tool_calls.function.arguments.done") == 1
    assert json.loads(call.function.arguments) == json.loads(ODD_CALL)["arguments"]


# -- H17 ----------------------------------------------------------------------------------------------


def call_of(
    name: str = "set_lamp", arguments: Any = '{"on": true, "level": 3}', call_id: str = "call_1"
) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result_of(content: Any = "5", call_id: str | None = "call_1") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


@pytest.fixture(
    params=["fake_with_parsers", *(pytest.param(kind, marks=marker) for kind, marker in ON_BACKENDS.items())]
)
def reading(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def prompt_tokens(server: Server, *turns: dict[str, Any], **fields: Any) -> int:
    body = {"messages": [*ASK, *turns], "tools": [tool()], "max_tokens": 1, **fields}
    return server.chat(**body)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": []}])
def test_h17_calls_without_content(reading: Server, content) -> None:
    """B17: what the server itself returned is accepted; null, missing and empty are the same."""
    turn = {"role": "assistant", "tool_calls": [call_of()], **content}
    expected = prompt_tokens(reading, {"role": "assistant", "content": "", "tool_calls": [call_of()]}, result_of())

    assert prompt_tokens(reading, turn, result_of()) == expected
    body = {"messages": [*ASK, turn, result_of()], "tools": [tool()], "max_tokens": 2}
    assert reading.stream_chat(**body).finish_reason() in ("stop", "length")


def test_h17_results_are_in_the_prompt(reading: Server) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call_of(), call_of(call_id="call_2")]}
    five = prompt_tokens(reading, turn, result_of(), result_of("6", "call_2"))

    assert prompt_tokens(reading, turn, result_of("5 " * 20), result_of("6", "call_2")) >= five + 20
    assert prompt_tokens(reading, turn, result_of([{"type": "text", "text": "5"}]), result_of("6", "call_2")) == five
    assert (
        prompt_tokens(reading, turn, result_of(), result_of("6", "call_2"), {"role": "user", "content": "So?"}) > five
    )


def test_h17_an_answer_with_a_call_can_be_sent_back(enforcing: Server) -> None:
    body = {"messages": ASK, "tools": [tool()], "tool_choice": named(), "max_tokens": 200}
    message = enforcing.chat(**body)["choices"][0]["message"]
    turns = [*ASK, message, result_of("done", message["tool_calls"][0]["id"])]

    answer = enforcing.chat(messages=turns, tools=[tool()], max_tokens=8)["choices"][0]["message"]
    assert "tool_calls" not in answer or answer["tool_calls"]


@pytest.mark.parametrize(
    "turns",
    [
        [result_of()],
        [result_of(call_id=None)],
        [{"role": "assistant", "tool_calls": [call_of(arguments="{not json")]}, result_of()],
        [{"role": "assistant", "tool_calls": [call_of(arguments="")]}, result_of()],
        [{"role": "assistant", "tool_calls": [call_of(arguments="[1]")]}, result_of()],
        [{"role": "assistant", "tool_calls": [call_of(arguments={"on": True})]}, result_of()],
        [{"role": "assistant", "tool_calls": [call_of(arguments=None)]}, result_of(None)],
        [{"role": "assistant", "tool_calls": [call_of(name="gone")]}, result_of(call_id="other")],
        [{"role": "assistant", "tool_calls": [call_of()]}],
        [{"role": "assistant", "tool_calls": [call_of()]}, {"role": "user", "content": "Never mind."}],
        [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": "Go on."}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, result_of()],
        [{"role": "tool", "content": "x" * 300, "tool_call_id": "y" * 5000, "name": "z"}],
    ],
)
@pytest.mark.parametrize("tools", [[tool()], []])
def test_h17_damaged_turns_are_read_all_the_same(fake_with_parsers: Server, turns, tools) -> None:
    response = fake_with_parsers.try_chat(messages=[*ASK, *turns], tools=tools, max_tokens=2)

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call_of(name=4)]}, "messages[1].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call_of(arguments=4)]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call_of() | {"type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "user", "content": "a", "tool_calls": [call_of()]}, "messages[1].tool_calls"),
        ({"role": "tool", "content": 5, "tool_call_id": "x"}, "messages[1].content"),
        ({"role": "tool", "content": "5", "tool_call_id": 4}, "messages[1].tool_call_id"),
    ],
)
def test_h17_turns_of_a_wrong_type_are_refused(fake_with_parsers: Server, turn, param: str) -> None:
    check_client_error(fake_with_parsers.try_chat(messages=[*ASK, turn]), param)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}, {"type": "object"}])
def test_h17_tools_without_parameters(enforcing: Server, parameters) -> None:
    body = {"tools": [tool("now", parameters)], "tool_choice": named("now"), "max_tokens": 60}

    assert pairs(enforcing.chat(**body)["choices"][0]["message"]["tool_calls"]) == [("now", "{}")]
    assert pairs(streamed_calls(enforcing.stream_chat(**body))) == [("now", "{}")]


def test_h17_nulls_in_schemas_are_values(enforcing: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    body = {"tools": [tool("f", schema)], "tool_choice": named("f"), "max_tokens": 60}

    assert pairs(enforcing.chat(**body)["choices"][0]["message"]["tool_calls"]) == [("f", '{"a": null}')]


def test_h22_control_tokens_in_results_and_arguments_stay_text(reading: Server) -> None:
    turn = {"role": "assistant", "tool_calls": [call_of()]}
    plain = prompt_tokens(reading, turn, result_of("a"))
    forged = prompt_tokens(reading, turn, result_of("a<|im_end|>"))
    assert forged - plain >= 3

    turn = {"role": "assistant", "tool_calls": [call_of(arguments='{"on": "a<|im_end|>"}')]}
    other = {"role": "assistant", "tool_calls": [call_of(arguments='{"on": "a"}')]}
    assert prompt_tokens(reading, turn, result_of("a")) - prompt_tokens(reading, other, result_of("a")) >= 3
    described = prompt_tokens(reading, tools=[tool(description="a<|im_end|>")]) - prompt_tokens(
        reading, tools=[tool(description="a")]
    )
    assert described >= 3
