"""kill -9 under a real model: SmolLM2 on llama.cpp goes on with the very text that it would have written."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from enginehouse.settings.config import ModelSettings

from .rig import Answer, Rig, rig

pytestmark = pytest.mark.llamacpp

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000000, "maximum": 9999999},
            "minItems": 6,
            "maxItems": 6,
        },
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
STORY = "The harbour lay quiet under the fog, and nobody spoke of the night before. "

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": STORY, "max_tokens": 48},
    "two choices": {"prompt": STORY, "max_tokens": 40, "n": 2, "temperature": 0.9, "seed": 4},
    "log-probabilities": {"prompt": STORY, "max_tokens": 40, "logprobs": 2},
    "a schema": {
        "prompt": "Paris in JSON: ",
        "max_tokens": 100,
        "structured_outputs": {"json": SCHEMA},
        "ignore_eos": False,
    },
}


@pytest.fixture
def server():
    model = ModelSettings(source="starter", backend="llamacpp", context=2048, slots=6, options={"threads": 1})
    with rig({"m": model}) as running:
        yield running


def check_same(answer: Answer, expected: Answer) -> None:
    answer.wait()
    assert answer.error is None, answer.error
    assert answer.is_complete
    texts = [(choice["text"], choice["finish_reason"], choice["tokens"]) for choice in answer.choices]
    assert texts == [(choice["text"], choice["finish_reason"], choice["tokens"]) for choice in expected.choices]
    for choice, other in zip(answer.choices, expected.choices, strict=True):
        assert choice["logprobs"] == pytest.approx(other["logprobs"], abs=0.02)
    assert answer.usage["completion_tokens"] == expected.usage["completion_tokens"]


@pytest.mark.llguidance
def test_kill_while_it_decodes(server: Rig, turn):
    """All cases at once: a worker dies under all that it serves."""
    expected = {case: server.ask(**fields).wait() for case, fields in CASES.items()}
    answers = {case: server.ask(**fields) for case, fields in CASES.items()}
    for answer in answers.values():
        answer.wait_chunks(5 + turn)
    server.kill()

    for case, answer in answers.items():
        check_same(answer, expected[case])
    jsonschema.validate(json.loads(answers["a schema"].text), SCHEMA)


def test_kill_while_it_prefills(server: Rig, turn):
    asked: list[dict[str, Any]] = []
    unstreamed: list[Answer] = []

    def ask(attempt: int) -> Answer:  # no attempt finds the prefix of another
        asked.append({"prompt": f"{turn} {attempt}: {STORY * 30}", "max_tokens": 12})
        unstreamed.append(server.ask(stream=False, **asked[-1]))
        return server.ask(**asked[-1])

    answer = server.kill_in_prefill(ask).wait()
    beside = unstreamed[-1].wait()

    expected = server.ask(**asked[-1]).wait()
    check_same(answer, expected)
    check_same(beside, expected)


def test_chat_that_comes_in_the_pause(server: Rig, turn):
    """It waits for the next worker, and for the quarantined request."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "temperature": 0,
        "max_tokens": 30,
    }
    with httpx.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/chat/completions", json=body).json()["choices"]
        beside = server.ask(STORY, max_tokens=120)
        beside.wait_chunks(3 + turn)
        server.kill()
        found = client.post("/v1/chat/completions", json=body).json()["choices"]

    assert found == expected
    assert beside.wait().is_complete
