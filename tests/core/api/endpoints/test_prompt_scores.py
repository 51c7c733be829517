"""``prompt_logprobs`` and ``loglikelihood``: how probable a prompt's own tokens are."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.prompt_scores import PromptScores
from enginehouse.contract.types import PromptLogprobs, TokenLogprob

from .conftest import Endpoints

PROMPT = "Once upon a time, größer and wider"
MESSAGES = [{"role": "user", "content": "What is one and one?"}]


def check_ranked(listed: list[Any], num_top: int) -> None:
    """vLLM's form: null, then for each token itself and the best ones, by id."""
    assert listed[0] is None
    for entry in listed[1:]:
        (own, *_), ranks = entry, sorted(value["rank"] for value in entry.values())
        assert num_top <= len(entry) <= num_top + 1
        assert ranks[:num_top] == list(range(1, num_top + 1))
        assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in entry.values())
        assert all(value["logprob"] <= 0 for value in entry.values())
        by_rank = sorted(entry.values(), key=lambda value: value["rank"])
        assert [value["logprob"] for value in by_rank] == sorted((v["logprob"] for v in by_rank), reverse=True)
        assert int(own) >= 0


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_completions_report_every_token_but_the_first(model: Endpoints, num_top: int) -> None:
    token_ids = model.tokens(prompt=PROMPT)
    choice = model.complete(prompt=PROMPT, max_tokens=2, prompt_logprobs=num_top)["choices"][0]

    check_ranked(choice["prompt_logprobs"], num_top)
    assert [int(next(iter(entry))) for entry in choice["prompt_logprobs"][1:]] == token_ids[1:]
    assert "loglikelihood" not in choice


def test_values_are_those_of_echo(model: Endpoints) -> None:
    """Whichever way they are asked for."""
    fields = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    choice = model.complete(**fields, prompt_logprobs=4, loglikelihood=True)["choices"][0]
    echoed = choice["logprobs"]["token_logprobs"]
    num_prompt = len(choice["prompt_logprobs"])

    assert [next(iter(e.values()))["logprob"] for e in choice["prompt_logprobs"][1:]] == echoed[1:num_prompt]
    assert [e["logprob"] for e in choice["loglikelihood"]["content"]] == echoed[1:num_prompt]
    assert choice["logprobs"] == model.complete(**fields)["choices"][0]["logprobs"]


def test_cached_prompts_are_reported_all_the_same(model: Endpoints) -> None:
    model.complete(prompt=PROMPT, max_tokens=4)
    first = model.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    again = model.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]

    assert len(first) == len(model.tokens(prompt=PROMPT))
    assert again == first


def test_reporting_changes_no_answer(model: Endpoints) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1, "seed": 3, "n": 2}
    plain = model.complete(**fields)
    scored = model.complete(**fields, prompt_logprobs=0, loglikelihood=True)

    assert [choice["text"] for choice in scored["choices"]] == [choice["text"] for choice in plain["choices"]]
    assert scored["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_each_prompt_has_its_own_and_every_choice_shows_it(fake: Endpoints) -> None:
    answer = fake.complete(prompt=["One of them", "And two"], n=2, max_tokens=1, prompt_logprobs=0)
    listed = [choice["prompt_logprobs"] for choice in answer["choices"]]

    assert listed[0] == listed[1] != listed[2] == listed[3]
    assert [len(entries) for entries in listed[::2]] == [len("One of them"), len("And two")] or len(listed[0]) > 1


def test_prompt_of_one_token_has_nothing_to_report(fake: Endpoints) -> None:
    choice = fake.complete(prompt=[97], max_tokens=1, prompt_logprobs=2, loglikelihood=True)["choices"][0]

    assert choice["prompt_logprobs"] == [None]
    assert choice["loglikelihood"] == {"content": []}


def test_chats_report_the_rendered_prompt(model: Endpoints) -> None:
    """At the top of the answer, control tokens of the template included."""
    answer = model.answer(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=2, prompt_logprobs=2, loglikelihood=True
    )

    check_ranked(answer["prompt_logprobs"], 2)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    content = answer["loglikelihood"]["content"]
    assert [e["logprob"] for e in content] == [next(iter(e.values()))["logprob"] for e in answer["prompt_logprobs"][1:]]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert "What is one and one?" in b"".join(bytes(entry["bytes"]) for entry in content).decode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_say_the_same_before_everything_else(model: Endpoints, path: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 1, "loglikelihood": True}
    fields |= {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    whole = model.answer(path, **fields)
    holder = whole["choices"][0] if path == "/v1/completions" else whole
    chunks = [json.loads(line) for line in model.stream(path, **fields)[:-1]]
    scored = [h for c in chunks for h in (c, c["choices"][0]) if "prompt_logprobs" in h]

    assert [entry for part in scored for entry in part["prompt_logprobs"]] == holder["prompt_logprobs"]
    assert [e for part in scored for e in part["loglikelihood"]["content"]] == holder["loglikelihood"]["content"]
    texts = [place for place, chunk in enumerate(chunks) if "Once" not in str(chunk) and _text_of(chunk)]
    assert all(chunks.index(chunk) < texts[0] for chunk in chunks if "prompt_logprobs" in str(chunk))


def _text_of(chunk: dict[str, Any]) -> str:
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"])


def test_long_prompts_are_reported_in_pieces_that_join(fake: Endpoints) -> None:
    prompt = [97 + place % 26 for place in range(400)]
    whole = fake.complete(prompt=prompt, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    lines = fake.stream("/v1/completions", prompt=prompt, max_tokens=1, prompt_logprobs=0)
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]

    assert [int(next(iter(entry))) for entry in whole[1:]] == prompt[1:]
    assert [entry for choice in choices for entry in choice.get("prompt_logprobs", ())] == whole


def test_a_token_that_could_not_come_has_a_number_all_the_same() -> None:
    """JSON has no minus infinity, and null would say that the token was the first one."""
    scores = PromptScores(ChatBody(prompt="x", prompt_logprobs=0, loglikelihood=True), 1)
    members = scores.push(0, PromptLogprobs((TokenLogprob(5, b"x", -math.inf),), (9,)))
    written = json.loads(msgspec.json.encode(members))

    assert written["prompt_logprobs"][1]["5"]["logprob"] == written["loglikelihood"]["content"][0]["logprob"] == -9999.0


def test_not_asked_for_is_not_there(fake: Endpoints) -> None:
    answer = fake.complete(prompt=PROMPT, max_tokens=1, loglikelihood=False)

    assert not {"prompt_logprobs", "loglikelihood"} & set(answer["choices"][0])
    chat = fake.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert not {"prompt_logprobs", "loglikelihood"} & set(chat)
