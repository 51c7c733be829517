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
from langchain_tests.integration_tests import ChatModelIntegrationTests

from .conftest import Served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.llamacpp,
    pytest.mark.llguidance,
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    # ChatOllama leaves the connections of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

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
    for refused in (lambda: client.embed(served.starter, "x"), lambda: client.delete(served.starter)):
        with pytest.raises(ollama.ResponseError, match="not supported") as caught:
            refused()
        assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="nothing") as caught:
        client.chat("nothing", ASKED)
    assert caught.value.status_code == 404


class TestChatOllama(ChatModelIntegrationTests):
    """Greedy, with a penalty and a limit for a model that likes to repeat itself."""

    served: Served

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, served: Served) -> None:
        cls.served = served

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self.served.url,
            "model": self.served.starter,
            "temperature": 0,
            "repeat_penalty": 1.2,
            "num_predict": 100,
        }

    @property
    def supports_json_mode(self) -> bool:
        return False  # without a schema, a model of this size invents other members

    @property
    def has_tool_calling(self) -> bool:
        return False  # Ollama's API cannot force a call, and a model of this size talks instead
