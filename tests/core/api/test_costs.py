"""What requests cost their callers beyond a plain answer: attempts that nobody sees, answers that are broken off."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve, field, frozen

from enginehouse.contract.router import Acceptance, Attempt, RouteQuestion, RoutingDecision
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import RouterSettings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

pytestmark = pytest.mark.usefixtures("within_a_minute")

PER_MINUTE = 100_000
SLOW = {"step_delay_s": 0.1}


@frozen
class Unsure:
    """A router that takes no answer of a model but the last one's."""

    num_tokens: int = 3
    name: str = "unsure"
    api_version: int = 1
    asked: list[RouteQuestion] = field(factory=list)

    def route(self, question: RouteQuestion) -> RoutingDecision:
        accept = Acceptance(self.num_tokens, lambda probe: False)
        return RoutingDecision(
            attempts=tuple(Attempt(one.name, accept) for one in question.candidates), reason="as told"
        )


@contextlib.contextmanager
def serving(folder: Path, models: dict[str, list[Any]], num_probed: int = 3) -> Iterator[httpx.Client]:
    """A server of these scripts, whose name ``auto`` means the first of them and, as it is never sure, the next one."""
    settings = Settings(
        models={
            name: ModelSettings(source=write_script(folder / f"{name}.json", script), backend="scripted")
            for name, script in models.items()
        },
        limits=LimitsSettings(tokens_per_minute=PER_MINUTE),
        router=RouterSettings(strategy="unsure"),
        plugins=PluginsSettings(allow=("parsers",)),
    )
    registry = evolve(PluginRegistry.for_settings(settings), routers={"unsure": Unsure(num_probed)})
    with served(settings, registry, timeout=30) as client:
        yield client


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, **fields}


def spent(client: httpx.Client) -> int:
    """Tokens that requests have used so far, as one is told that asks for none itself."""
    refused = client.post("/v1/completions", json={"prompt": 1})
    assert refused.status_code == 400, refused.text
    return PER_MINUTE - int(refused.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_route_throws_away_count(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, {"small": list("abcdef"), "big": ["B"]}) as client:
        answer = client.post(
            "/v1/chat/completions", json=chat("auto", stream=stream), headers={"X-Enginehouse-Details": "true"}
        )
        used = spent(client)
    last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("{", "data: {"))][-1]
    routed = json.loads(last)["enginehouse"]["routed"]

    assert answer.headers["x-octomil-routed-model"] == "big"
    assert routed["discarded_tokens"] >= 3
    assert used == len("User: hi\nAssistant:") + 1 + routed["discarded_tokens"]


def figures_of_the_broken_off(client: httpx.Client) -> str:
    """``/metrics`` when it has been noticed that a client has left, and its request is over."""
    deadline = time.monotonic() + 60
    while "enginehouse_disconnects_total" not in (figures := client.get("/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return figures


def test_whoever_leaves_while_models_are_tried_pays_for_what_was_computed(tmp_path: Path) -> None:
    slow = ["a", {"delay_s": 0.3}] * 30
    with serving(tmp_path, {"small": slow, "big": ["B"]}, num_probed=16) as client:
        # Templates have been rendered once: on a busy machine their process needs longer than the client waits.
        client.post("/v1/chat/completions", json=chat("big")).raise_for_status()
        before = spent(client)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=chat("auto", max_tokens=30), timeout=3)
        figures_of_the_broken_off(client)
        used = spent(client) - before

    assert len("User: hi\nAssistant:") < used <= len("User: hi\nAssistant:") + 16


def test_calls_of_a_broken_off_answer_count(tmp_path: Path) -> None:
    call = ['<tool_call>\n{"name": "f", "arguments": {"x": "', *["a", {"delay_s": 0.02}] * 300]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = chat("small", tools=[tool], stream=True, max_tokens=1000)
    with serving(tmp_path, {"small": call, "big": ["B"]}) as client:
        prompt = client.post("/tokenize", json={key: body[key] for key in ("model", "messages", "tools")})
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            seen = 0
            for line in answer.iter_lines():
                seen += '"arguments":"' in line
                if seen == 40:
                    break
        figures_of_the_broken_off(client)
        used = spent(client)

    assert prompt.json()["count"] + seen // 2 <= used < prompt.json()["count"] + 302


def test_routes_of_broken_off_answers_are_counted(tmp_path: Path) -> None:
    slow = ["B", {"delay_s": 0.05}] * 200
    with serving(tmp_path, {"small": list("abcdef"), "big": slow}) as client:
        with client.stream("POST", "/v1/chat/completions", json=chat("auto", stream=True, max_tokens=200)) as answer:
            assert any('"content":"B"' in line for line in answer.iter_lines())
        figures = figures_of_the_broken_off(client)

    assert 'enginehouse_routed_requests_total{model="big"} 1' in figures
    assert 'enginehouse_discarded_tokens_total{model="big"} 3' in figures


def test_prompts_that_nobody_has_computed_cost_nothing(tmp_path: Path) -> None:
    """The request got no place in time; it is told to come again, and should not find its minute used up then."""
    model = ModelSettings(source=str(tmp_path), backend="fake", isolation="thread", slots=1, options=SLOW)
    settings = Settings(
        models={"big": model},
        limits=LimitsSettings(tokens_per_minute=PER_MINUTE, queue_timeout_s=0.3),
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=30) as client:
        endless = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as first:
            lines = first.iter_lines()  # it runs as long as somebody holds these
            assert next(line for line in lines if line.startswith("data"))
            before = spent(client)
            refused = client.post("/v1/completions", json={"prompt": "word " * 50, "max_tokens": 2})
            after = spent(client)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
    assert after == before
