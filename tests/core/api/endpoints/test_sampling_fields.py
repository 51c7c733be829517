"""The fields that say how to draw and when to stop, over HTTP: applied, or refused by name."""

from __future__ import annotations

import json
import math

import pytest

from .conftest import Endpoints

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Say something."}]
DRAWN = {"max_tokens": 60, "temperature": 2, "seed": 5, "ignore_eos": True}
SAMPLERS = [
    {"typical_p": 0.3},
    {"top_n_sigma": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    {"dynatemp_range": 0.9},
    {"mirostat": 2, "mirostat_tau": 1.0},
    {"samplers": ["top_k", "temperature"], "top_k": 2},
    {"min_p": 0.3, "samplers": ["temperature", "min_p"]},
]


def text(model: Endpoints, **fields: object) -> str:
    answer: str = model.complete(prompt=PROMPT, **{**DRAWN, **fields})["choices"][0]["text"]
    return answer


@pytest.mark.parametrize("fields", SAMPLERS, ids=str)
def test_samplers_have_their_effect_and_can_be_replayed(fake: Endpoints, fields: dict[str, object]) -> None:
    drawn = text(fake, **fields)

    assert drawn != text(fake)
    assert drawn == text(fake, **fields)
    streamed = fake.stream("/v1/completions", prompt=PROMPT, **{**DRAWN, **fields})
    assert "".join(json.loads(line)["choices"][0]["text"] for line in streamed[:-1]) == drawn


@pytest.mark.parametrize("fields", SAMPLERS, ids=str)
def test_samplers_of_several_choices_do_not_mix(fake: Endpoints, fields: dict[str, object]) -> None:
    answer = fake.complete(prompt=PROMPT, n=3, **{**DRAWN, **fields})
    texts = [choice["text"] for choice in answer["choices"]]

    assert texts[0] == text(fake, **fields)
    assert len(set(texts)) == 3


def test_penalties_count_the_last_tokens_only(model: Endpoints) -> None:
    def penalised(**fields: object) -> str:
        return text(model, **{"temperature": 0, "max_tokens": 24, "repetition_penalty": 3.0, **fields})

    whole, none = penalised(), penalised(repetition_penalty=1.0)

    assert penalised(repeat_last_n=-1) == penalised(repeat_last_n=1000) == whole != none
    assert penalised(repeat_last_n=0) == none
    assert penalised(repeat_last_n=12) not in (whole, none)


def test_log_probabilities_are_those_of_the_draw_on_request(model: Endpoints) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "temperature": 1.5, "top_k": 2, "logprobs": 5}
    before, after = (
        model.complete(**body, post_sampling_probs=is_after)["choices"][0]["logprobs"] for is_after in (False, True)
    )

    assert before["tokens"] == after["tokens"] and min(len(one) for one in before["top_logprobs"]) == 5
    for ranked in after["top_logprobs"]:
        assert len(ranked) == 2 and sum(map(math.exp, ranked.values())) == pytest.approx(1, abs=1e-3)


def test_order_changes_what_is_drawn(fake: Endpoints) -> None:
    """Both lists have the same steps."""
    fields = {"min_p": 0.4}

    first = text(fake, **fields, samplers=["temperature", "min_p"])
    assert first == text(fake, **fields)
    assert first != text(fake, **fields, samplers=["min_p", "temperature"])


def test_names_of_llama_cpp_are_known(fake: Endpoints) -> None:
    names = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

    assert text(fake, samplers=names) == text(fake)


@pytest.mark.parametrize("repetition_penalty", [0.001, 1000])
@pytest.mark.parametrize("temperature", [5e-324, 2])
def test_values_at_the_bounds_draw(fake: Endpoints, repetition_penalty: float, temperature: float) -> None:
    """No logit becomes infinite on the way, which would fail the request."""
    bounds = {"dry_multiplier": 100, "dry_base": 10, "dry_allowed_length": 0, "dry_sequence_breakers": []}
    others = {"presence_penalty": -2, "frequency_penalty": 2, "dynatemp_exponent": 10}
    fields = {"repetition_penalty": repetition_penalty, "temperature": temperature, "dynatemp_range": 2}

    assert text(fake, **fields, **bounds, **others)


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"samplers": ["top_q"]}, "samplers", "did you mean 'top_"),
        ({"samplers": ["infill"]}, "samplers", "no such step: 'infill'"),
        ({"samplers": ["top_k", "top_k"]}, "samplers", "twice"),
        ({"samplers": "edkypmxt"}, "samplers", "must be a list"),
        ({"samplers": [1]}, "samplers[0]", "must be a string"),
        ({"samplers": ["top_k"], "top_p": 0.5}, "samplers", "does not list 'top_p'"),
        ({"samplers": ["top_k"], "dry_multiplier": 1}, "samplers", "does not list 'dry'"),
        ({"mirostat": 2, "top_k": 40}, "top_k", "not together with mirostat"),
        ({"mirostat": 2, "typical_p": 0.5}, "typical_p", "not together with mirostat"),
        ({"mirostat": 1, "adaptive_target": 0.5}, "adaptive_target", "not together with mirostat"),
        ({"mirostat": 3}, "mirostat", "must be 0 (off), 1 or 2"),
        ({"mirostat": True}, "mirostat", "must be a whole number"),
        ({"mirostat_eta": 2}, "mirostat_eta", "<= 1"),
        ({"dry_multiplier": -1}, "dry_multiplier", ">= 0"),
        ({"dry_base": 0.5}, "dry_base", ">= 1"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length", "must be a whole number"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n", ">= -1"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers", "1 to 100 characters"),
        ({"dry_sequence_breakers": "\n"}, "dry_sequence_breakers", "must be a list"),
        ({"dynatemp_range": 3}, "dynatemp_range", "<= 2"),
        ({"dynatemp_exponent": "1"}, "dynatemp_exponent", "must be a number"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", ">= 0.001"),
        ({"min_tokens": -1}, "min_tokens", ">= 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "numbers from 0 on"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "must be in"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "must be a whole number"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids", "at most 1024"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "must be a whole number"),
        ({"loglikelihood": 1}, "loglikelihood", "must be true or false"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_are_refused_by_name(
    fake: Endpoints, fields: dict[str, object], param: str, problem: str, stream: bool
) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        error = fake.refusal(path, stream=stream, **prompt, **{"max_tokens": 8, **fields})

        assert error["param"] == param
        assert problem in error["message"]


def test_half_characters_do_no_harm(fake: Endpoints) -> None:
    """Wherever a text may stand."""
    for field in ("samplers", "dry_sequence_breakers"):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "dry_multiplier": 1, field: ["\ud800"]})
        response = fake.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})

        assert response.status_code in (200, 400)
        assert response.json()
    assert fake.complete(prompt=PROMPT, max_tokens=1)


def test_stop_token_ids_end_the_text(model: Endpoints) -> None:
    """Also when the model's own end tokens are to be ignored; the token is not shown."""
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    whole = model.complete(**fields, logprobs=0)["choices"][0]
    token_ids = model.tokens(content=whole["text"])
    kept = model.complete(**fields, stop_token_ids=[token_ids[4]])["choices"][0]

    assert kept["finish_reason"] == "stop"
    assert len(kept["text"]) < len(whole["text"])
    assert whole["text"].startswith(kept["text"])


def test_min_tokens_holds_stop_token_ids_back(model: Endpoints) -> None:
    """Every second token of the vocabulary ends the text, but not before its time."""
    ids = list(range(0, 280, 2)) if model.tokens(content="a")[0] < 300 else list(range(0, 1000))
    fields = {"prompt": PROMPT, "temperature": 1, "seed": 1, "max_tokens": 30, "stop_token_ids": ids}
    answer = model.complete(**fields, min_tokens=10, ignore_eos=True)

    assert answer["usage"]["completion_tokens"] >= 10


@pytest.mark.llguidance
def test_min_tokens_gives_way_to_a_complete_answer(fake: Endpoints) -> None:
    """A grammar that allows only the end is not broken."""
    choice = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "yes"}}}
    answer = fake.answer(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=40, min_tokens=30, response_format=choice
    )

    assert json.loads(answer["choices"][0]["message"]["content"]) == "yes"
    assert answer["choices"][0]["finish_reason"] == "stop"
