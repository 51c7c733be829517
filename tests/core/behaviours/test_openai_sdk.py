"""The openai package against the server, streamed and not.

tox runs this with both majors that are in use: `core` has 2.x and the fake model, `llamacpp` has 3.x and the real one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

from .client import Server

MESSAGES: Any = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture
def sdk(model_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{model_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


class Chat:
    """One way of asking: ``create`` or a stream that is put together from its chunks."""

    def __init__(self, sdk: openai.OpenAI, model: str, streamed: bool) -> None:
        self._create = sdk.chat.completions.create
        self._model = model
        self._streamed = streamed

    def ask(self, **fields: Any) -> dict[str, Any]:
        """``choices`` by index, each with role, content, finish_reason and logprobs; and ``usage``."""
        common = {"model": self._model, "messages": MESSAGES, "temperature": 0, **fields}
        if self._streamed:
            return self._join(self._create(stream=True, stream_options={"include_usage": True}, **common))
        answer = self._create(**common)
        assert answer.object == "chat.completion" and answer.model == self._model
        choices = {
            choice.index: {
                "role": choice.message.role,
                "content": choice.message.content,
                "finish_reason": choice.finish_reason,
                "logprobs": choice.logprobs.content if choice.logprobs else None,
            }
            for choice in answer.choices
        }
        return {"choices": choices, "usage": answer.usage}

    def _join(self, stream: openai.Stream[Any]) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        usage = None
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk" and chunk.model == self._model
            usage = chunk.usage or usage
            for part in chunk.choices:
                empty = {"role": None, "content": "", "finish_reason": None, "logprobs": None}
                choice = choices.setdefault(part.index, empty)
                choice["role"] = choice["role"] or part.delta.role
                choice["content"] += part.delta.content or ""
                choice["finish_reason"] = choice["finish_reason"] or part.finish_reason
                if part.logprobs:
                    choice["logprobs"] = [*(choice["logprobs"] or ()), *part.logprobs.content]
        return {"choices": choices, "usage": usage}


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def chat(request: pytest.FixtureRequest, sdk: openai.OpenAI, model_server: Server) -> Chat:
    return Chat(sdk, model_server.model, request.param)


def test_sdk_role_content_finish_reason_usage(chat: Chat, model_server: Server) -> None:
    answer = chat.ask(max_tokens=12)
    choice, usage = answer["choices"][0], answer["usage"]

    expected = model_server.chat(messages=MESSAGES, max_tokens=12)["choices"][0]
    assert choice["role"] == "assistant"
    assert choice["content"] == expected["message"]["content"] != ""
    assert choice["finish_reason"] == expected["finish_reason"]
    assert usage.prompt_tokens > 5
    assert 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_sdk_limits(chat: Chat, name: str) -> None:
    answer = chat.ask(**{name: 3})

    assert answer["usage"].completion_tokens == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sdk_n_and_seed(chat: Chat) -> None:
    fields = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    first, again = chat.ask(**fields), chat.ask(**fields)
    other = chat.ask(**fields | {"seed": 6})

    assert sorted(first["choices"]) == [0, 1, 2]
    assert first["choices"] == again["choices"]
    assert len({choice["content"] for choice in first["choices"].values()}) > 1
    assert first["choices"] != other["choices"]
    assert all(choice["role"] == "assistant" for choice in first["choices"].values())
    assert 3 <= first["usage"].completion_tokens <= 24


@pytest.mark.parametrize("as_list", [False, True])
def test_sdk_stop(chat: Chat, as_list: bool) -> None:
    text = chat.ask(max_tokens=12)["choices"][0]["content"]
    stop = text[len(text) // 2 :][:3]
    answer = chat.ask(max_tokens=12, stop=[stop] if as_list else stop)["choices"][0]

    assert answer["content"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_sdk_logprobs(chat: Chat) -> None:
    choice = chat.ask(max_tokens=6, logprobs=True, top_logprobs=3)["choices"][0]

    assert b"".join(bytes(entry.bytes) for entry in choice["logprobs"]).decode("utf-8", "ignore") == choice["content"]
    for entry in choice["logprobs"]:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
    assert chat.ask(max_tokens=2)["choices"][0]["logprobs"] is None


class Place(BaseModel):
    city: Literal["Paris", "Rome"]
    people: int = Field(ge=0, le=99)


PARAMETERS = Place.model_json_schema()
TOOL: Any = {"type": "function", "function": {"name": "go_to", "parameters": PARAMETERS}}
GO_TO: Any = {"type": "function", "function": {"name": "go_to"}}


@pytest.mark.llguidance
@pytest.mark.parametrize("choice", ["required", GO_TO])
def test_sdk_tool_call_and_its_result(sdk: openai.OpenAI, model_server: Server, choice: Any) -> None:
    fields: Any = {"model": model_server.model, "temperature": 0, "max_tokens": 200, "tools": [TOOL]}
    answer = sdk.chat.completions.create(
        messages=MESSAGES, tool_choice=choice, parallel_tool_calls=False, **fields
    ).choices[0]

    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "go_to"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "arrived"}
    turns = [*MESSAGES, answer.message, result]
    assert sdk.chat.completions.create(messages=turns, tool_choice="none", **fields).choices[0].message.content


@pytest.mark.llguidance
def test_sdk_streamed_tool_call(sdk: openai.OpenAI, model_server: Server) -> None:
    fields: Any = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": GO_TO, "temperature": 0, "max_tokens": 200}
    with sdk.chat.completions.stream(model=model_server.model, **fields) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        choice = stream.get_final_completion().choices[0]

    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls"
    assert call.function.arguments == "".join(deltas)
    assert len(deltas) > 2
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


@pytest.mark.llguidance
def test_sdk_parse_gives_the_model_class(sdk: openai.OpenAI, model_server: Server) -> None:
    fields: Any = {"model": model_server.model, "messages": MESSAGES, "temperature": 1.2, "max_tokens": 200}
    answer = sdk.chat.completions.parse(response_format=Place, n=2, seed=3, **fields)

    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Place)
        assert choice.finish_reason == "stop"


@pytest.mark.llguidance
def test_sdk_parse_reads_the_arguments_of_a_strict_tool(sdk: openai.OpenAI, model_server: Server) -> None:
    fields: Any = {"model": model_server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    tool = openai.pydantic_function_tool(Place)
    answer = sdk.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **fields)

    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Place)


@pytest.mark.llguidance
def test_sdk_streams_structured_output(sdk: openai.OpenAI, model_server: Server) -> None:
    fields: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    with sdk.chat.completions.stream(model=model_server.model, response_format=Place, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message

    assert "".join(deltas) == message.content
    assert len(deltas) > 1
    assert isinstance(message.parsed, Place)


@pytest.fixture
def thinker(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """A client of a model that reasons before it answers."""
    (tmp_path / "t.jinja").write_text("{% if enable_thinking %}{% endif %}{{ messages[0].content }}<think>")
    model = ModelSettings(
        source=write_script(tmp_path / "s.json", ["plan", " A", "</think>", "Answer", " 7"]),
        backend="scripted",
        chat_template=str(tmp_path / "t.jinja"),
    )
    with server_thread(Settings(models={"m": model}, plugins=PluginsSettings(allow=("parsers",)))) as running:
        server = Server.connect(running.url, "m")
        with server.client, openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client:
            server.wait_ready()
            yield client


def test_sdk_reasoning(thinker: openai.OpenAI) -> None:
    answer = thinker.chat.completions.create(model="m", messages=MESSAGES, reasoning_effort="low")
    message = answer.choices[0].message
    chunks = list(thinker.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]

    assert (message.model_extra or {})["reasoning_content"] == "plan A"
    assert message.content == "Answer 7"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "plan A"
    assert "".join(delta.content or "" for delta in deltas) == "Answer 7"


@pytest.mark.parametrize("streamed", [False, True])
def test_sdk_legacy_completions(sdk: openai.OpenAI, model_server: Server, streamed: bool) -> None:
    fields: Any = {"model": model_server.model, "prompt": ["One, two,", "Red and"], "temperature": 0, "max_tokens": 4}
    answers = sdk.completions.create(stream=True, **fields) if streamed else [sdk.completions.create(**fields)]
    texts = ["", ""]
    for answer in answers:
        for choice in answer.choices:
            texts[choice.index] += choice.text

    assert texts == [choice["text"] for choice in model_server.complete(**fields)["choices"]]
    assert all(texts)


def test_sdk_refusals_are_its_own_exceptions(sdk: openai.OpenAI, model_server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        sdk.chat.completions.create(model="no-such-model", messages=MESSAGES, stream=True)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=model_server.model, messages=MESSAGES, temperature=9)
    assert refused.value.param == "temperature"
    assert model_server.model in [model.id for model in sdk.models.list()]


async def test_sdk_asynchronous_stream_left_early(model_server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{model_server.url}/v1", api_key="unused", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(model=model_server.model, messages=MESSAGES, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
    model_server.check_alive()
