"""Ollama's clients: the package `ollama`, and LangChain's standard suite for `ChatOllama`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ollama", reason="ollama is not installed")
pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")

import ollama
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama

from .conftest import Served
from .harness import MARKS, ScriptedSuite, StarterSuite

pytestmark = MARKS

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
SHORT = {"temperature": 0, "num_predict": 24}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    return ollama.Client(served.url)


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: name of the city.
    """
    return "sunny" if city == "Oslo" else "rainy"


def test_a_stream_adds_up_to_the_whole_answer(client: Any, served: Served) -> None:
    *parts, last = client.chat(served.starter, ASKED, stream=True, options=SHORT)
    whole = client.chat(f"{served.starter}:latest", ASKED, options=SHORT)

    assert "".join(part.message.content for part in parts) == whole.message.content
    assert last.done and last.eval_count == whole.eval_count <= 24
    for answer in (last, whole):
        spent = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
        assert 0 < spent <= answer.total_duration


def test_a_python_function_is_a_tool(client: Any, served: Served) -> None:
    first = client.chat(served.caller, ASKED, tools=[weather]).message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
    second = client.chat(served.caller, [*ASKED, first, result], tools=[weather]).message

    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert second.content == "It is sunny."


def test_thinking_and_formats(client: Any, served: Served) -> None:
    thought = client.chat(served.thinker, ASKED, think=True).message
    formatted = client.generate(served.starter, "Name a city.", format=CITY, options=SHORT).response

    assert (thought.thinking, thought.content) == ("plan A", "Answer 7")
    assert formatted.replace(" ", "") in ('{"city":"Paris"}', '{"city":"Rome"}')


def test_models_and_refusals(client: Any, served: Served) -> None:
    assert [model.model for model in client.list().models] == [served.starter, served.thinker, served.caller]
    assert client.show(served.starter).modelinfo["llama.context_length"] == 2048
    assert client.pull(served.starter).status == "success"
    with pytest.raises(ollama.ResponseError, match="not supported") as caught:
        client.delete(served.starter)
    assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="is for the task 'generate'") as caught:
        client.embed(served.starter, "x")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="nothing") as caught:
        client.chat("nothing", ASKED)
    assert caught.value.status_code == 404


class _OverOllama:
    """The client; with a higher penalty, the model cannot repeat the names of members that it is asked for."""

    served: Any

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def client_params(self) -> dict[str, Any]:
        return {"base_url": self.served.url, "temperature": 0, "repeat_penalty": 1.1, "num_predict": 100}


class TestChatOllama(_OverOllama, StarterSuite):
    """With the small model."""

    @property
    def has_tool_calling(self) -> bool:
        return False  # Ollama's API cannot force a call, and a model of this size talks instead


class TestChatOllamaScripted(_OverOllama, ScriptedSuite):
    """With the script."""
