"""What ends a text: ``include_stop_str_in_output`` shows it, ``stop_regex`` finds it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Endpoints

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ({"stop": [" wo"]}, "Hello", " wo"),
        ({"stop_regex": r"\s+w"}, "Hello", " w"),
        ({"stop_regex": ["l.*r", "[xyz]"]}, "He", "llo wor"),
        ({"stop_regex": "lo? ", "stop": "o w"}, "Hel", "lo "),
        ({"stop_regex": "o w", "stop": "lo w"}, "Hel", "lo w"),
        ({"stop_regex": "(?m)^H[^x]{9}"}, "", "Hello worl"),
        ({"stop_regex": "^world"}, "Hello world", None),
    ],
    ids=str,
)
def test_the_text_ends_before_it_or_after_it(
    scripted: Endpoints, stop: dict[str, Any], text: str, found: str | None
) -> None:
    for shown in (False, True):
        expected = text + (found or "") if shown else text
        body = {**stop, "include_stop_str_in_output": shown, "n": 2}
        whole = scripted.answer("/v1/chat/completions", **CHAT, **body)["choices"]
        *chunks, _ = scripted.stream("/v1/chat/completions", **CHAT, **body)
        streamed = [json.loads(chunk)["choices"][0] for chunk in chunks]

        assert [choice["message"]["content"] for choice in whole] == [expected, expected]
        assert scripted.complete(prompt="Hi", **body)["choices"][1]["text"] == expected
        for index in (0, 1):
            parts = [choice for choice in streamed if choice["index"] == index]
            assert "".join(part["delta"].get("content", "") for part in parts) == expected
            assert parts[-1]["finish_reason"] == "stop"


def test_a_computed_answer_is_cut_where_re_finds_the_match(model: Endpoints) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    text = model.complete(**body)["choices"][0]["text"]
    stopped = model.complete(**body, stop_regex="[aeiou][^aeiou]")["choices"][0]["text"]
    begin = next(at for at in range(len(text) - 1) if text[at] in "aeiou" and text[at + 1] not in "aeiou")

    assert stopped == text[:begin]


@pytest.mark.parametrize(
    ("value", "param", "problem"),
    [
        ("(", "stop_regex", "'(' is not closed"),
        (["a", "b$"], "stop_regex", "'$' is not supported"),
        ("a*", "stop_regex", "matches the empty text"),
        (["a"] * 17, "stop_regex", "at most 16 items"),
        (7, "stop_regex", "must be a string or a list of strings"),
        (["a" * 400, "b" * 200], "stop_regex", "all expressions together may have 500 parts"),
    ],
    ids=str,
)
def test_a_wrong_expression_is_refused(fake: Endpoints, value: Any, param: str, problem: str) -> None:
    refused = fake.refusal("/v1/completions", prompt="a", stop_regex=value)

    assert refused["param"] == param
    assert problem in refused["message"]
