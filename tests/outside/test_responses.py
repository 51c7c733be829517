"""The Responses API with clients of others: `openai` (its accumulator judges streams), `openai-agents`, Open Responses'
client, LangChain's suite, and Codex.

The models are scripted but for those parts that need one that can be constrained.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="openai is not installed")

from openai import NotFoundError, OpenAI
from pydantic import BaseModel

from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import started_server

from .commands import run

pytestmark = [pytest.mark.slow, pytest.mark.llamacpp, pytest.mark.llguidance]

CODEX_LIMIT_S = 100
PATCH = "*** Begin Patch\n*** Add File: hello.txt\n+Hello from a patch\n*** End Patch\n"
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": False}
CONFIG = """
[models.starter]
source = "starter"
context = 2048
[models."gpt-5.5"]
source = "gpt-5.5.json"
backend = "scripted"
[models.cached]
source = "."
backend = "fake"
context = 200_000
slots = 2
[models.think]
source = "think.json"
backend = "scripted"
chat_template = "think.jinja"
[plugins.responses]
file = "responses.sqlite"
"""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def _call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    """A call as tokens of seven bytes."""
    data = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>".encode()
    return [{"bytes": list(data[start : start + 7])} for start in range(0, len(data), 7)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("responses")
    words = [part for number in range(60) for part in (f"w{number} ", {"delay_s": 0.02})]
    scripts: dict[str, tuple[list[Any], dict[str, list[Any]]]] = {
        "say": (["Hello", " world", "!"], {}),
        "slow": (words, {}),
        "think": (["<think>", "plan", " A", "</think>", "\n\n", "Answer", " 7"], {}),
        "agent": (_call("weather", place="Rome"), {"sunny": ["It is ", "sunny."]}),
        "gpt-5.5": (  # a name that Codex knows, which gets the tool apply_patch
            _call("exec_command", cmd="printf 'alpha%s' beta"),
            {
                "alphabeta": _call("apply_patch", input=PATCH),
                "Success. Updated the following files": ["Done: ", "hello.txt is there."],
            },
        ),
    }
    config = CONFIG + "".join(
        f'[models.{name}]\nsource = "{name}.json"\nbackend = "scripted"\n' for name in ("say", "slow", "agent")
    )
    for name, (tokens, replies) in scripts.items():
        write_script(folder / f"{name}.json", tokens, replies=replies)
    (folder / "think.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "enginehouse.toml").write_text(config, encoding="utf-8")
    with started_server("--config", folder / "enginehouse.toml", cwd=folder) as process:
        assert process.url is not None
        yield process.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as connected:
        yield connected


# -- openai ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kinds", "text"),
    [
        ("say", ["message"], "Hello world!"),
        ("agent", ["function_call"], ""),
        ("think", ["reasoning", "message"], "Answer 7"),
    ],
)
def test_the_sdk_accumulates_streams(client: OpenAI, model: str, kinds: list[str], text: str) -> None:
    with client.responses.stream(model=model, input="hi", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    stored = client.responses.retrieve(final.id)

    assert events[-1].type == "response.completed" and final.status == "completed"
    assert [item.type for item in final.output] == kinds and final.output_text == stored.output_text == text
    assert [item.id for item in final.output] == [item.id for item in stored.output]
    assert [item.type for item in client.responses.input_items.list(final.id)] == ["message"]


def test_the_sdk_parses_structured_output(client: OpenAI) -> None:
    class Person(BaseModel):
        name: str
        age: int

    parsed = client.responses.parse(model="starter", input="Ann is 7 years old.", text_format=Person, temperature=0)

    assert isinstance(parsed.output_parsed, Person)


def test_the_sdk_takes_a_broken_stream_up_again(client: OpenAI) -> None:
    stream = client.responses.create(model="slow", input="hi", stream=True)
    events = iter(stream)
    first = [next(events) for _ in range(9)]
    stream.close()
    assert first[0].type == "response.created"
    rest = list(client.responses.retrieve(first[0].response.id, stream=True, starting_after=first[-1].sequence_number))

    numbers = [event.sequence_number for event in [*first, *rest]]
    assert numbers == list(range(len(numbers))) and rest[-1].type == "response.completed"


def test_the_sdk_cancels_and_deletes(client: OpenAI) -> None:
    response = client.responses.create(model="slow", input="hi", background=True)

    assert response.status == "queued" and client.responses.cancel(response.id).status == "cancelled"
    client.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)


def test_a_regular_expression_and_a_grammar_are_enforced(client: OpenAI) -> None:
    """The small model would never write these by itself."""
    regex = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}"}
    lark = {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "say \\"" /[a-z]{3,9}/ "\\"" LF\n%import common.LF',
    }
    for form, matching in ((regex, r"[0-9]{4}-[0-9]{2}"), (lark, r'say "[a-z]{3,9}"\n')):
        tool: Any = {"type": "custom", "name": "write", "description": "Write.", "format": form}
        for choice in ("required", {"type": "custom", "name": "write"}):
            with client.responses.stream(
                model="starter", input="Write.", tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=200
            ) as stream:
                final = stream.get_final_response()
            (call,) = final.output
            assert call.type == "custom_tool_call" and re.fullmatch(matching, call.input), call.input


# -- Open Responses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["say", "agent"])
def test_open_responses_own_client_takes_it(url: str, model: str) -> None:
    """The strict one, which demands ``[DONE]``. Its events of reasoning have other names than OpenAI's."""
    openresponses = pytest.importorskip("openresponses", reason="openresponses-py is not installed")
    with openresponses.OpenResponses(api_key="unused", base_url=f"{url}/v1") as connected:
        body = {"model": model, "input": "hi", "tools": [WEATHER]}
        assert connected.responses.create(body).status == "completed"
        with connected.responses.create({**body, "stream": True}) as stream:
            assert len(list(stream)) > 5 and stream.final_response.status == "completed"


# -- openai-agents -----------------------------------------------------------------------------------


async def test_an_agent_calls_a_tool_and_goes_on(url: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(place: str) -> str:
        """The weather of a place."""
        return f"sunny in {place}"

    agent = agents.Agent(name="Agent", instructions="Use the tools.", model="agent", tools=[weather])
    provider = agents.OpenAIProvider(base_url=f"{url}/v1", api_key="unused", use_responses=True)
    config = agents.RunConfig(model_provider=provider)
    first = await agents.Runner.run(agent, "Weather?", run_config=config, auto_previous_response_id=True)
    second = await agents.Runner.run(agent, "Again?", run_config=config, previous_response_id=first.last_response_id)
    streamed = agents.Runner.run_streamed(agent, "Weather?", run_config=config)
    async for _ in streamed.stream_events():
        pass

    assert first.final_output == second.final_output == streamed.final_output == "It is sunny."


# -- Codex -------------------------------------------------------------------------------------------


Codex = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def codex(url: str, tmp_path: Path) -> Codex:
    """Call it with the name of a model and arguments of `codex exec`; it works in ``tmp_path / "work"``."""
    found = Path(__file__).parent / "node" / "node_modules" / ".bin" / "codex"
    if shutil.which("node") is None or not found.exists():
        pytest.skip("@openai/codex is not installed; run: npm install --prefix tests/outside/node")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    provider = '[model_providers.enginehouse]\nname = "Enginehouse"\nwire_api = "responses"\n'

    def ask(model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        text = f'model = "{model}"\nmodel_provider = "enginehouse"\n{provider}base_url = "{url}/v1"\n'
        (home / "config.toml").write_text(text, encoding="utf-8")
        command = [str(found), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        environment = {**os.environ, "CODEX_HOME": str(home)}
        return run([*command, *arguments], cwd=work, env=environment, limit_s=CODEX_LIMIT_S)

    return ask


def test_codex_runs_a_command_edits_a_file_and_answers(codex: Codex, tmp_path: Path) -> None:
    done = codex("gpt-5.5", "Greet, then add a file.")

    assert "alphabeta" in done.stderr and "Done: hello.txt is there." in done.stdout
    assert (tmp_path / "work" / "hello.txt").read_text() == "Hello from a patch\n"


def test_the_second_turn_of_codex_finds_its_prompt_in_the_cache(codex: Codex) -> None:
    def usage(*arguments: str) -> dict[str, int]:
        events = [json.loads(line) for line in codex("cached", "--json", *arguments).stdout.splitlines()]
        (counted,) = [event["usage"] for event in events if event["type"] == "turn.completed"]
        return counted

    first, second = usage("Say something"), usage("resume", "--last", "And more")

    assert second["cached_input_tokens"] >= first["input_tokens"] > 1000
