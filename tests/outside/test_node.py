"""npm's clients: the AI SDK over chats, Responses and Messages, `openai`, and `ollama`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .commands import run
from .conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.llamacpp, pytest.mark.llguidance]

FOLDER = Path(__file__).parent / "node"
NODE_LIMIT_S = 100

Drive = Callable[..., Any]


@pytest.fixture
def drive(served: Served) -> Drive:
    """Call it with a script, a case and a model; what the client understood."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("npm's packages are not installed; run: npm install --prefix tests/outside/node")

    def ask(script: str, case: str, model: str = served.starter, *more: str) -> Any:
        url = served.url if script == "ollama" else f"{served.url}/v1"
        command = [node, f"{script}.mjs", url, model, case, *more]
        return json.loads(run(command, cwd=FOLDER, limit_s=NODE_LIMIT_S).stdout)

    return ask


def of_type(parts: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [part for part in parts if part["type"] == kind]


def check_lamp(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"on", "level"}
    assert isinstance(arguments["on"], bool)
    assert 0 <= arguments["level"] <= 10


def check_place(place: dict[str, Any]) -> None:
    assert set(place) == {"city", "people"}
    assert place["city"] in ("Paris", "Rome")
    assert 0 <= place["people"] <= 99


# -- the AI SDK ---------------------------------------------------------------------------------------

PROVIDERS = ("openai-compatible", "openai", "anthropic")  # chats, Responses, Messages


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    """The package `@ai-sdk/...` that speaks to the server."""
    name: str = request.param
    return name


def test_ai_sdk_streams_text(drive: Drive, served: Served, provider: str) -> None:
    parts = drive("ai_sdk", "text", served.starter, provider)

    assert len(of_type(parts, "text-delta")) > 3
    assert "Paris" in "".join(part["text"] for part in of_type(parts, "text-delta"))
    (finish,) = of_type(parts, "finish")
    assert finish["finishReason"] in ("stop", "length")
    usage = finish["totalUsage"]
    assert usage["inputTokens"] > 5 and 0 < usage["outputTokens"] <= 24
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"]


def test_ai_sdk_streams_reasoning_parts(drive: Drive, served: Served, provider: str) -> None:
    parts = drive("ai_sdk", "reasoning", served.thinker, provider)
    kinds = [part["type"] for part in parts]

    assert "".join(part["text"] for part in of_type(parts, "text-delta")) == "Answer 7"
    assert kinds.index("reasoning-start") < kinds.index("reasoning-end") < kinds.index("text-delta")
    (finish,) = of_type(parts, "finish")
    assert finish["finishReason"] == "stop"
    if provider == "openai":  # it reads summaries of reasoning only, which this server does not write
        assert finish["totalUsage"]["reasoningTokens"] > 0
    else:
        assert "".join(part["text"] for part in of_type(parts, "reasoning-delta")).strip() == "plan A"


def test_ai_sdk_reads_reasoning_of_whole_answers(drive: Drive, served: Served, provider: str) -> None:
    answer = drive("ai_sdk", "whole_reasoning", served.thinker, provider)

    assert (answer["text"], answer["finishReason"]) == ("Answer 7", "stop")
    assert answer["reasoningText"] == ("" if provider == "openai" else "plan A")


def test_ai_sdk_streams_tool_calls(drive: Drive, served: Served, provider: str) -> None:
    parts = drive("ai_sdk", "tools", served.starter, provider)

    (call,) = of_type(parts, "tool-call")
    assert call["toolName"] == "set_lamp"
    check_lamp(call["input"])
    deltas = [part["delta"] for part in of_type(parts, "tool-input-delta")]
    assert len(deltas) > 2
    assert json.loads("".join(deltas)) == call["input"]
    assert of_type(parts, "finish")[0]["finishReason"] == "tool-calls"


def test_ai_sdk_runs_a_tool_and_asks_again(drive: Drive, served: Served, provider: str) -> None:
    answer = drive("ai_sdk", "tool_turns", served.starter, provider)
    first, second = answer["steps"]

    assert first["calls"] == [{"toolName": "now", "input": {}}]
    assert first["results"] == ["a quarter past nine"]
    assert first["finishReason"] == "tool-calls"
    assert second["calls"] == []
    assert answer["text"]


def test_ai_sdk_structured_output(drive: Drive, served: Served, provider: str) -> None:
    check_place(drive("ai_sdk", "object", served.starter, provider))


def test_ai_sdk_streams_structured_output(drive: Drive, served: Served, provider: str) -> None:
    answer = drive("ai_sdk", "streamed_object", served.starter, provider)

    check_place(answer["final"])
    assert answer["partial"][-1] == answer["final"]
    assert len(answer["partial"]) > 1


def test_ai_sdk_errors_carry_status_and_message(drive: Drive, served: Served, provider: str) -> None:
    error = drive("ai_sdk", "refused", served.starter, provider)

    assert error["name"] == "AI_APICallError"
    assert error["status"] == 404
    assert "no-such-model" in error["message"]


# -- openai -------------------------------------------------------------------------------------------


def test_npm_openai_streams_text(drive: Drive) -> None:
    answer = drive("openai", "text")

    assert "".join(answer["deltas"]) == answer["content"]
    assert "Paris" in answer["content"]
    assert len(answer["deltas"]) > 3
    assert answer["finishReason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] <= 24


def test_npm_openai_streams_tool_calls(drive: Drive) -> None:
    answer = drive("openai", "tools")

    assert answer["call"]["name"] == "set_lamp"
    assert "".join(answer["deltas"]) == answer["call"]["arguments"]
    check_lamp(json.loads(answer["call"]["arguments"]))
    assert answer["finishReason"] == "tool_calls"


def test_npm_openai_parses_structured_output(drive: Drive) -> None:
    check_place(drive("openai", "parse"))


def test_npm_openai_errors_are_its_own(drive: Drive) -> None:
    error = drive("openai", "refused")

    assert error == {"name": "BadRequestError", "status": 400, "param": "temperature", "code": "invalid_value"}


# -- ollama -------------------------------------------------------------------------------------------


def test_npm_ollama_streams_text(drive: Drive) -> None:
    answer = drive("ollama", "text")
    last = answer["last"]

    assert len(answer["deltas"]) > 3 and "".join(answer["deltas"])
    assert last["done_reason"] in ("stop", "length") and 0 < last["eval_count"] <= 24
    assert 0 < last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


def test_npm_ollama_separates_thinking(drive: Drive, served: Served) -> None:
    message = drive("ollama", "thinking", served.thinker)

    assert message == {"role": "assistant", "content": "Answer 7", "thinking": "plan A"}


def test_npm_ollama_runs_a_tool(drive: Drive, served: Served) -> None:
    answer = drive("ollama", "tools", served.caller)
    (call,) = answer["first"]["tool_calls"]

    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}
    assert answer["second"]["content"] == "It is sunny."


def test_npm_ollama_enforces_a_schema(drive: Drive) -> None:
    assert drive("ollama", "format")["city"] in ("Paris", "Rome")


def test_npm_ollama_lists_models(drive: Drive, served: Served) -> None:
    answer = drive("ollama", "models")

    assert [model["model"] for model in answer["list"]["models"]] == [served.starter, served.thinker, served.caller]
    assert answer["show"]["model_info"]["llama.context_length"] == 2048
    assert "tools" in answer["show"]["capabilities"]
    assert answer["ps"]["models"][0]["name"] == served.starter


def test_npm_ollama_errors_carry_status_and_message(drive: Drive) -> None:
    error = drive("ollama", "refused")

    assert (error["name"], error["status"]) == ("ResponseError", 501)
    assert "/api/delete" in error["message"]
