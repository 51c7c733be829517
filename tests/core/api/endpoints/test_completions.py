"""``/v1/completions``: echo, scoring, the best of several, text for gaps."""

from __future__ import annotations

import json

import openai
import pytest

from .conftest import Endpoints

PROMPT = "Once upon a time, größer"
SCORE = {"echo": True, "logprobs": 0, "max_tokens": 0}


# -- echo -------------------------------------------------------------------------------------------


def test_echo_puts_the_prompt_in_front(model: Endpoints) -> None:
    alone = model.complete(prompt=PROMPT, max_tokens=6, temperature=0)
    echoed = model.complete(prompt=PROMPT, max_tokens=6, temperature=0, echo=True)

    assert echoed["choices"][0]["text"] == PROMPT + alone["choices"][0]["text"]
    assert echoed["choices"][0]["logprobs"] is None
    assert echoed["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


def test_echo_of_token_ids_is_their_text(model: Endpoints) -> None:
    token_ids = model.tokens(content=PROMPT)
    answer = model.complete(prompt=token_ids, max_tokens=3, echo=True)

    assert answer["choices"][0]["text"].startswith(PROMPT)


def test_echo_of_each_prompt_and_choice(fake: Endpoints) -> None:
    answer = fake.complete(prompt=["One", "Two"], n=2, max_tokens=2, echo=True)

    assert [choice["text"][:3] for choice in answer["choices"]] == ["One", "One", "Two", "Two"]


@pytest.mark.parametrize("num_top", [0, 3])
def test_echo_with_logprobs(model: Endpoints, num_top: int) -> None:
    """The tokens of the prompt come first, the first of them without a value."""
    choice = model.complete(prompt=PROMPT, max_tokens=4, temperature=0, echo=True, logprobs=num_top)["choices"][0]
    logprobs = choice["logprobs"]
    num_prompt_tokens = len(model.tokens(prompt=PROMPT))

    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, ranked in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in ranked
        assert max(1, num_top) - 2 <= len(ranked) <= num_top + 1  # tokens with one text have one entry
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)
    answer = model.complete(prompt=PROMPT, max_tokens=4, temperature=0, logprobs=num_top)["choices"][0]["logprobs"]
    assert logprobs["tokens"][num_prompt_tokens:] == answer["tokens"]
    assert [offset - len(PROMPT) for offset in logprobs["text_offset"][num_prompt_tokens:]] == answer["text_offset"]


def test_echo_scores_what_the_model_would_draw(model: Endpoints) -> None:
    """The log-probability of a token is the same in a prompt and in an answer."""
    token_ids = model.tokens(content="The sky is blue and")
    scored = model.complete(prompt=token_ids, **SCORE)["choices"][0]
    drawn = [
        model.complete(prompt=token_ids[:position], max_tokens=1, logprobs=0, logit_bias={token_ids[position]: 100})
        for position in range(1, len(token_ids))
    ]

    assert scored["finish_reason"] == "length"
    assert scored["text"] == "The sky is blue and"
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(
        [answer["choices"][0]["logprobs"]["token_logprobs"][0] for answer in drawn], abs=0.05
    )


def test_scoring_generates_nothing(model: Endpoints) -> None:
    answer = model.complete(prompt=[PROMPT, "One"], n=2, **SCORE)

    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, PROMPT, "One", "One"]
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_scoring_the_same_prompt_again_gives_all_tokens(model: Endpoints) -> None:
    """A prefix that is already in the cache is scored all the same."""
    first, second = (model.complete(prompt=PROMPT, **SCORE)["choices"][0]["logprobs"] for _ in range(2))

    assert second["tokens"] == first["tokens"]
    assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=0.05)


def test_scoring_one_token(fake: Endpoints) -> None:
    logprobs = fake.complete(prompt=[72], **SCORE)["choices"][0]["logprobs"]

    assert logprobs == {"tokens": ["H"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


def test_openai_client_scores_prompts(fake: Endpoints) -> None:
    """As evaluation tools do it: several prompts as token ids, no answer."""
    with openai.OpenAI(base_url=str(fake.client.base_url.join("/v1")), api_key="x") as client:
        answer = client.completions.create(
            model="fake", prompt=[[72, 105], [72, 105, 33]], echo=True, logprobs=1, max_tokens=0
        )

    first, second = (choice.logprobs for choice in answer.choices)
    assert first is not None and second is not None
    assert second.tokens == ["H", "i", "!"]
    assert second.token_logprobs is not None and first.token_logprobs == second.token_logprobs[:2]
    assert second.text_offset == [0, 1, 2]


@pytest.mark.parametrize("engine", ["fake", "scripted"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_echo_streams_the_same(request: pytest.FixtureRequest, engine: str, logprobs: int | None) -> None:
    server: Endpoints = request.getfixturevalue(engine)
    body = {"prompt": [PROMPT, "One"], "n": 2, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": logprobs}
    whole = server.complete(**body)["choices"]
    events = server.stream("/v1/completions", **body)
    chunks = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]

    assert events[-1] == "[DONE]"
    for choice in whole:
        parts = [part for part in chunks if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if logprobs is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "guided_regex": "a+"}, "guided_regex"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "suffix": "x"}, "echo"),
    ],
)
def test_wrong_echoes_are_refused(fake: Endpoints, body: dict, param: str) -> None:
    assert fake.refusal("/v1/completions", prompt="One", **body)["param"] == param


# -- the best of several ----------------------------------------------------------------------------


def test_best_of_shows_the_most_probable(fake: Endpoints) -> None:
    """The answers are those of as many choices with the same seed, ranked by their mean log-probability."""
    body = {"prompt": "One", "max_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": 0}
    drawn = fake.complete(**body, n=4)["choices"]
    best = fake.complete(**body, n=2, best_of=4)

    def mean(choice: dict) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values) if values else float("-inf")

    ranked = sorted(drawn, key=mean, reverse=True)
    assert len({choice["text"] for choice in drawn}) > 2
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] == ranked[0]["logprobs"]
    assert best["usage"]["completion_tokens"] == fake.complete(**body, n=4)["usage"]["completion_tokens"]


def test_best_of_without_logprobs_shows_none(fake: Endpoints) -> None:
    answer = fake.complete(prompt=["One", "Two"], best_of=3, max_tokens=4, seed=3)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_best_of_as_many_as_shown(fake: Endpoints) -> None:
    body = {"prompt": "One", "max_tokens": 4, "seed": 3, "n": 2}

    assert fake.complete(**body, best_of=2)["choices"] == fake.complete(**body)["choices"]
    assert fake.stream("/v1/completions", **body, best_of=2)[-1] == "[DONE]"


@pytest.mark.parametrize(
    "body", [{"best_of": 1, "n": 2}, {"best_of": 5}, {"best_of": 0}, {"best_of": 2, "stream": True}]
)
def test_wrong_best_of_is_refused(fake: Endpoints, body: dict) -> None:
    assert fake.refusal("/v1/completions", prompt="One", **body)["param"] == "best_of"


# -- text for gaps ----------------------------------------------------------------------------------


def test_suffix_is_refused_by_name_where_the_model_fills_no_gaps(model: Endpoints) -> None:
    error = model.refusal("/v1/completions", prompt="def f(", suffix="return 1")

    assert error["param"] == "suffix"
    assert error["code"] == "unsupported_parameter"
    assert "infill" in error["message"]


@pytest.mark.parametrize("before", ["def f(", ""])
def test_suffix_makes_a_prompt_with_a_gap(fake: Endpoints, before: str) -> None:
    """The same prompt, written with its control tokens, has the same answer."""
    body = {"model": "filling", "max_tokens": 8, "temperature": 0}
    filled = fake.complete(prompt=before, suffix="return <|im_end|>", **body)
    token_ids = [
        *fake.tokens(content=f"<|bos|>{before}<|im_start|>"),
        *fake.tokens(content="return <|im_end|>", parse_special=False),
        *fake.tokens(content="<|eos|>"),
    ]
    written = fake.complete(prompt=token_ids, **body)

    assert filled["choices"] == written["choices"]
    assert filled["usage"]["prompt_tokens"] == len(token_ids)


def test_suffix_goes_with_text_only(fake: Endpoints) -> None:
    assert fake.refusal("/v1/completions", prompt=[1, 2], suffix="x")["param"] == "suffix"
