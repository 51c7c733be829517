"""Schemas against the whole server at a high temperature: each finished answer validates, or the schema was refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, currently_in_test_context, example, given, note, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_llguidance.schemas.keywords import KEYWORDS
from enginehouse_testkit.served import served

from .strategies import schemas
from .walks import ENFORCED, dialect_of

SEEN: Counter[str] = Counter()


def serve(name: str, model: ModelSettings) -> Iterator[httpx.Client]:
    with served(Settings(models={name: model}, plugins=PluginsSettings()), timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    source = str(tmp_path_factory.mktemp("fake"))
    yield from serve("fake", ModelSettings(source=source, backend="fake", isolation="thread", context=2048))


@pytest.fixture(scope="module")
def smollm2() -> Iterator[httpx.Client]:
    yield from serve("starter", ModelSettings(source="starter", context=512, options={"threads": 1}))


def body_of(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Give an example."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}},
        "temperature": 1.3,
        "n": 2,
        **fields,
    }


def ask(
    client: httpx.Client, schema: Any, *, seed: int, stream: bool, max_tokens: int, dialect: Any = Draft202012Validator
) -> None:
    """Ask for two answers and judge those that are finished; ``dialect`` reads the schema for that."""
    body = body_of(schema, seed=seed, stream=stream, max_tokens=max_tokens)
    if stream:
        texts, reasons = streamed(client, body)
    else:
        texts, reasons = whole(client, body)
    validator = dialect(schema, format_checker=dialect.FORMAT_CHECKER)
    for text, reason in zip(texts, reasons, strict=True):
        if currently_in_test_context():
            note(f"answered {text!r}, {reason}")
        SEEN[reason] += 1
        if reason == "stop":
            assert [error.message for error in validator.iter_errors(json.loads(text))] == []
        else:
            assert reason == "length"


def whole(client: httpx.Client, body: dict[str, Any]) -> tuple[list[str], list[str]]:
    response = client.post("/v1/chat/completions", json=body)
    if is_refused(response):
        return [], []
    choices = response.json()["choices"]
    return [choice["message"]["content"] for choice in choices], [choice["finish_reason"] for choice in choices]


def streamed(client: httpx.Client, body: dict[str, Any]) -> tuple[list[str], list[str]]:
    texts, reasons = ["", ""], ["", ""]
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.read()
        if is_refused(response):
            return [], []
        for line in response.text.split("\n\n"):
            data = line.removeprefix("data: ")
            for choice in json.loads(data)["choices"] if data.startswith("{") else ():
                texts[choice["index"]] += choice["delta"].get("content") or ""
                reasons[choice["index"]] += choice["finish_reason"] or ""
    return texts, reasons


def is_refused(response: httpx.Response) -> bool:
    """Whether the schema was refused, in good form and before the first byte."""
    if response.status_code == 200:
        return False
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"].startswith("response_format.json_schema.schema: ")
    SEEN["refused"] += 1
    return True


unhurried = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], print_blob=True)
FEW = {"minimum": 10, "maximum": 99, "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}
ORDER = {  # what is checked when it is complete
    "type": "object",
    "properties": {
        "price": {"type": "number", "multipleOf": 0.01, "minimum": 0.5, "maximum": 9},
        "sizes": {"type": "array", "items": {"enum": ["S", "M", "L"]}, "uniqueItems": True, "minItems": 2},
    },
    "required": ["price", "sizes"],
}


@pytest.mark.parametrize("keyword", [name for name, word in KEYWORDS.items() if word.status != "annotation"])
def test_every_keyword_is_enforced_or_refused_as_the_table_says(fake: httpx.Client, keyword: str) -> None:
    """What docs/structured.md says holds for requests: refused by JSON pointer, or every finished answer validates."""
    if KEYWORDS[keyword].status == "refused":
        inner = {keyword: True}
        response = fake.post("/v1/chat/completions", json=body_of({"properties": {"x": {"type": "array", **inner}}}))
        assert is_refused(response)
        assert f"'/properties/x/{keyword}'" in response.json()["error"]["message"]
        return
    dialect = dialect_of(keyword)
    for seed in range(4):
        ask(fake, ENFORCED[keyword][0], seed=seed, stream=bool(seed % 2), max_tokens=80, dialect=dialect)


def test_what_no_value_satisfies_is_refused_and_what_few_do_is_answered(fake: httpx.Client) -> None:
    refused = fake.post("/v1/chat/completions", json=body_of({"oneOf": [{}] * 13}, stream=True))
    taken = fake.post("/v1/chat/completions", json=body_of({"type": "integer", **FEW}, max_tokens=4))

    assert is_refused(refused)
    assert "no value was found" in refused.json()["error"]["message"]
    assert taken.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_members_that_are_no_keywords_are_listed_as_ignored(fake: httpx.Client, stream: bool) -> None:
    """By the standard they are annotations; one that looks misspelt is listed with a hint."""
    schema = {
        "type": "object",
        "x-order": 1,
        "properties": {"a": {"type": "integer", "minimun": 1, "readonly": True}, "b": {"format": "phone"}},
    }
    response = fake.post("/v1/chat/completions", json=body_of(schema, max_tokens=4, stream=stream))

    path = "response_format.json_schema.schema"
    assert response.status_code == 200
    assert response.headers["x-enginehouse-ignored"].split(", ") == [
        f"{path}.x-order",
        f"{path}.properties.a.minimun (did you mean minimum?)",
        f"{path}.properties.a.readonly (did you mean readOnly?)",
        f"{path}.properties.b.format (unknown: phone)",
    ]


@settings(unhurried, max_examples=100)
@given(schema=schemas(), seed=st.integers(0, 2**32), stream=st.booleans())
@example(schema=PERSON, seed=1, stream=True)
@example(schema=PERSON, seed=2, stream=False)
@example(schema=ORDER, seed=3, stream=True)
@example(schema=ORDER, seed=4, stream=False)
def test_every_finished_answer_of_the_fake_model_validates(
    fake: httpx.Client, schema: Any, seed: int, stream: bool
) -> None:
    ask(fake, schema, seed=seed, stream=stream, max_tokens=80)


@pytest.mark.llamacpp
@settings(unhurried, max_examples=25)
@given(schema=schemas(), seed=st.integers(0, 2**32), stream=st.booleans())
@example(schema=PERSON, seed=1, stream=True)
@example(schema=PERSON, seed=2, stream=False)
@example(schema=ORDER, seed=3, stream=True)
@example(schema=ORDER, seed=4, stream=False)
def test_every_finished_answer_of_a_real_model_validates(
    smollm2: httpx.Client, schema: Any, seed: int, stream: bool
) -> None:
    ask(smollm2, schema, seed=seed, stream=stream, max_tokens=60)


@pytest.mark.llamacpp
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(unhurried, max_examples=400)
@given(schema=schemas(), seed=st.integers(0, 2**32), stream=st.booleans())
def test_every_finished_answer_of_a_real_model_validates_at_length(
    smollm2: httpx.Client, schema: Any, seed: int, stream: bool
) -> None:
    ask(smollm2, schema, seed=seed, stream=stream, max_tokens=60)


@pytest.mark.parametrize("model", ["fake", pytest.param("smollm2", marks=pytest.mark.llamacpp)])
def test_arguments_of_enforced_calls_validate(request: pytest.FixtureRequest, model: str) -> None:
    """Streamed or not, with the same seed: the same arguments, with everything that their schema asks for."""
    client = request.getfixturevalue(model)
    tool = {"type": "function", "function": {"name": "order", "parameters": ORDER}}
    for seed in range(2 if model == "fake" else 1):
        fields = {"tools": [tool], "tool_choice": "required", "seed": seed, "max_tokens": 120, "n": 1}
        body = {**body_of(ORDER), **fields}
        del body["response_format"]
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
        response = client.post("/v1/chat/completions", json={**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line.startswith("{")]
        parts = [call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls") or ()]

        assert "".join(parts) == whole[0]["function"]["arguments"]
        Draft202012Validator(ORDER).validate(json.loads("".join(parts)))


def test_answers_were_finished_and_schemas_were_taken() -> None:
    """The tests above would pass if everything were refused or cut."""
    assert not SEEN or (SEEN["stop"] > 10 and SEEN["refused"] > 10)
