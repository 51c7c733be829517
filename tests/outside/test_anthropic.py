"""Anthropic's SDK: its stream helper accumulates events, and raises where they are wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="Anthropic's SDK is not installed")

import anthropic
from pydantic import BaseModel

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

from .conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.llamacpp, pytest.mark.llguidance]

CALL = ["I look.", "\n<tool_call>\n", '{"name": "weather", "arguments": {"city": "Par', 'is"}}', "\n</tool_call>"]
SCRIPTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "agent": (CALL, {"replies": {"sunny in Paris": ["It is ", "sunny."]}}),
    "broken": (["Hel", {"error": "boom"}], {}),
    "one-at-a-time": ([{"delay_s": 0.7}, "Done."], {}),
}
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HI = [{"role": "user", "content": "Hi"}]


class Place(BaseModel):
    """What structured output is read into."""

    city: str
    people: int


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A client of a server whose models follow scripts."""
    folder = tmp_path_factory.mktemp("anthropic")
    models = ""
    for name, (tokens, options) in SCRIPTS.items():
        source = json.dumps(write_script(folder / f"{name}.json", tokens, **options))
        models += f'[models.{name}]\nsource = {source}\nbackend = "scripted"\n'
    models += "slots = 1\nmax_queue = 0\n"
    config = folder / "enginehouse.toml"
    config.write_text(models, encoding="utf-8")
    with started_server("--config", config) as process:
        yield anthropic.Anthropic(base_url=process.url, api_key="unused", max_retries=0)


@pytest.fixture
def client(served: Served) -> anthropic.Anthropic:
    """A client of the server with the small model, and one that reasons."""
    return anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0)


def plain(message: Any) -> dict[str, Any]:
    """A message without its id, as the wire has it."""
    return message.model_dump(exclude={"id"}, exclude_unset=True, warnings=False)


def test_a_stream_accumulates_to_the_message(client: anthropic.Anthropic, served: Served) -> None:
    asked = {
        "model": served.thinker,
        "messages": HI,
        "max_tokens": 50,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "plan A" and text == message.content[1].text == "Answer 7"
    assert plain(final) == plain(message)


def test_without_thinking_nothing_is_thought(client: anthropic.Anthropic, served: Served) -> None:
    message = client.messages.create(model=served.thinker, messages=HI, max_tokens=50)

    assert [block.type for block in message.content] == ["text"]


def test_a_real_model_answers(client: anthropic.Anthropic, served: Served) -> None:
    messages = [{"role": "user", "content": "Name the capital of France."}]
    asked = {"model": served.starter, "messages": messages, "max_tokens": 24, "extra_body": {"temperature": 0}}
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
    final = stream.get_final_message()
    counted = client.messages.count_tokens(model=served.starter, messages=messages)
    usage = final.usage

    assert "Paris" in "".join(pieces) and len(pieces) > 3
    assert final.stop_reason in ("end_turn", "max_tokens")
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_prefill_is_continued(client: anthropic.Anthropic, served: Served) -> None:
    messages = [
        {"role": "user", "content": "Name the capital of France."},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    asked = {"model": served.starter, "messages": messages, "max_tokens": 3, "extra_body": {"temperature": 0}}

    assert client.messages.create(**asked).content[0].text.startswith(" Paris")


def test_structured_output(client: anthropic.Anthropic, served: Served) -> None:
    parsed = client.messages.parse(
        model=served.starter,
        messages=[{"role": "user", "content": "Paris has 2 million people."}],
        max_tokens=100,
        output_format=Place,
        extra_body={"temperature": 0},
    )

    assert isinstance(parsed.parsed_output, Place)


@pytest.mark.parametrize(
    ("choice", "name"), [({"type": "any"}, "weather"), ({"type": "tool", "name": "weather"}, "weather")]
)
def test_a_call_is_enforced(client: anthropic.Anthropic, served: Served, choice: dict[str, Any], name: str) -> None:
    message = client.messages.create(
        model=served.starter, messages=HI, max_tokens=200, tools=[WEATHER], tool_choice=choice
    )

    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"][:1]
    assert call.name == name and isinstance(call.input["city"], str)


def test_a_loop_with_tools(scripted: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    asked = {"model": "agent", "max_tokens": 100, "tools": [WEATHER]}
    with scripted.messages.stream(messages=messages, **asked) as stream:
        first = stream.get_final_message()
    text, call = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": f"sunny in {call.input['city']}"}
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    second = scripted.messages.create(messages=messages, **asked)

    assert (text.text, call.name, call.input, first.stop_reason) == (
        "I look.",
        "weather",
        {"city": "Paris"},
        "tool_use",
    )
    assert second.content[0].text == "It is sunny." and second.stop_reason == "end_turn"


def test_the_tool_runner(scripted: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"sunny in {city}"

    runner = scripted.beta.messages.tool_runner(
        model="agent", max_tokens=100, tools=[weather], messages=[{"role": "user", "content": "Weather in Paris?"}]
    )

    assert runner.until_done().content[0].text == "It is sunny."
    assert asked == ["Paris"]


def test_models(client: anthropic.Anthropic, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [served.starter, served.thinker, served.caller]
    assert client.models.retrieve(served.starter).max_input_tokens == 2048


def test_errors(scripted: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="none"):
        scripted.messages.create(model="none", messages=HI, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type") as refused:
        scripted.messages.create(model="agent", messages=HI, max_tokens=5, thinking={"type": "on"})
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]
    assert refused.value.type == "invalid_request_error"


def test_an_error_in_a_stream_is_raised(scripted: anthropic.Anthropic) -> None:
    with (
        pytest.raises(anthropic.APIStatusError, match="The model failed") as failed,
        scripted.messages.stream(model="broken", messages=HI, max_tokens=50) as stream,
    ):
        stream.until_done()

    assert failed.value.type == "api_error"


def test_an_overload_is_retried(scripted: anthropic.Anthropic) -> None:
    asked = {"model": "one-at-a-time", "messages": HI, "max_tokens": 5}
    with scripted.messages.stream(**asked) as running:
        next(iter(running))  # it has the only slot
        with pytest.raises(anthropic.OverloadedError):
            scripted.messages.create(**asked)
        reader = threading.Thread(target=running.until_done)
        reader.start()
        message = scripted.with_options(max_retries=3).messages.create(**asked)
        reader.join()

    assert message.content[0].text == "Done."
