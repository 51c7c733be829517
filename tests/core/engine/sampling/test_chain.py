"""The order of the steps: their own, and the one that a request lists."""

import itertools

import numpy as np
import pytest

from enginehouse.contract.types import SamplingParams
from enginehouse.engine.constraints import TokenMask
from enginehouse.engine.sampling.sampler import SequenceSampler

PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
ROW = np.log(PROBABILITIES).astype(np.float32)


def sampler_of(prompt=(), vocab_size=5, **params):
    return SequenceSampler(SamplingParams(**params), choice=0, vocab_size=vocab_size, prompt_token_ids=prompt)


def drawn(sampler, row=ROW, mask=None, num_draws=1500):
    return {sampler.sample(row.copy(), position, mask).token_id for position in range(num_draws)}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        # Of 0.53, 0.33, 0.09: temperature first makes the nucleus smaller.
        ({"samplers": ("temperature", "top_p")}, {0, 1}),
        ({"samplers": ("top_p", "temperature")}, {0, 1, 2}),
        ({"samplers": ("top_p", "top_k")}, {0, 1}),
        ({"samplers": ("top_k", "top_p")}, {0, 1}),
        ({"samplers": ("temperature",)}, {0, 1, 2, 3, 4}),
        ({"samplers": ()}, {0, 1, 2, 3, 4}),
    ],
    ids=str,
)
def test_steps_run_as_listed_and_no_others(params, kept):
    params = {"temperature": 0.5, "top_p": 0.81, "top_k": 2, **params}

    assert drawn(sampler_of(**params)) == kept


def test_order_decides_what_a_share_is_of():
    """Of three tokens the best has 0.47, of all five 0.4."""
    assert drawn(sampler_of(top_p=0.45, top_k=3, samplers=("top_k", "top_p"))) == {0}
    assert drawn(sampler_of(top_p=0.45, top_k=3, samplers=("top_p", "top_k"))) == {0, 1}


def test_temperature_after_truncation_changes_no_set_but_the_odds():
    """Truncation at temperature 1, then the draw at the request's."""
    sampler = sampler_of(temperature=2.0, top_k=2, samplers=("top_k", "temperature"))
    draws = [sampler.sample(ROW.copy(), position).token_id for position in range(4000)]
    share = np.sqrt(0.4) / (np.sqrt(0.4) + np.sqrt(0.3))

    assert set(draws) == {0, 1}
    assert draws.count(0) / 4000 == pytest.approx(share, abs=0.03)


def test_temperature_that_is_not_listed_is_off():
    one, other = sampler_of(temperature=0.1, seed=4, samplers=("top_k",)), sampler_of(temperature=1.0, seed=4)

    for position in range(50):
        assert one.sample(ROW.copy(), position).token_id == other.sample(ROW.copy(), position).token_id


@pytest.mark.parametrize("order", list(itertools.permutations(("penalties", "temperature", "top_k"))), ids="-".join)
def test_penalties_may_stand_anywhere(order):
    """Before top-k they decide who is in, behind it only who wins; behind the temperature they weigh more."""
    params = {"presence_penalty": 2.0, "temperature": 0.5, "top_k": 2, "samplers": order}
    sampler = sampler_of(**params)
    sampler.accept(0)
    draws = [sampler.sample(ROW.copy(), position).token_id for position in range(3000)]
    logits = np.log(PROBABILITIES)
    alive = list(range(5))
    for step in order:
        if step == "penalties":
            logits[0] -= 2.0
        elif step == "temperature":
            logits = logits / 0.5
        else:
            alive = sorted(alive, key=lambda token_id: -logits[token_id])[:2]
    weights = {token_id: np.exp(logits[token_id]) for token_id in alive}
    expected = {token_id: weight / sum(weights.values()) for token_id, weight in weights.items()}

    assert {token_id: draws.count(token_id) / 3000 for token_id in set(draws)} == pytest.approx(expected, abs=0.035)


def test_penalties_behind_other_steps_leave_the_raw_logprobs_alone():
    sampler = sampler_of(presence_penalty=2.0, top_k=3, num_logprobs=5, samplers=("top_k", "penalties"))
    sampler.accept(0)
    sampled = sampler.sample(ROW.copy(), 0)

    assert sampled.top_ids.tolist() == [0, 1, 2, 3, 4]
    assert np.exp(sampled.top_logprobs) == pytest.approx(PROBABILITIES, rel=1e-5)
    assert np.exp(sampled.logprob) == pytest.approx(PROBABILITIES[sampled.token_id], rel=1e-5)


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_greedy_counts_penalties_wherever_they_stand(num_logprobs):
    """The order matters to no greedy draw."""
    for samplers in (None, ("top_k", "penalties"), ("penalties",)):
        sampler = sampler_of(temperature=0, presence_penalty=2.0, top_k=1, samplers=samplers, num_logprobs=num_logprobs)
        sampler.accept(0)
        sampled = sampler.sample(ROW.copy(), 0)

        assert sampled.token_id == 1
        if num_logprobs:
            assert np.exp(sampled.logprob) == pytest.approx(0.3, rel=1e-5)


def test_mask_holds_in_every_order():
    """It comes before truncation, which could leave nothing of what is allowed."""
    mask = TokenMask(np.array([0b11000], np.int32))
    for samplers in (None, ("top_k", "temperature", "penalties"), ("temperature", "penalties", "top_p")):
        sampler = sampler_of(
            temperature=0.9, top_k=1, top_p=0.5, repetition_penalty=1.3, prompt=[0, 3], samplers=samplers
        )

        assert drawn(sampler, mask=mask, num_draws=60) <= {3, 4}


@pytest.mark.parametrize("temperature", [1e-3, 1.0])
def test_low_temperature_behind_a_truncation_without_the_best_token(temperature):
    """Weights are relative to the best token that is left, so they do not vanish."""
    row = np.array([900.0, 2.0, 1.999, 0.0, -np.inf], np.float32)
    sampler = sampler_of(
        temperature=temperature, frequency_penalty=2.0, samplers=("top_k", "penalties", "temperature"), top_k=4
    )
    for _ in range(450):
        sampler.accept(0)

    assert drawn(sampler, row, num_draws=100) == ({1, 2} if temperature < 1 else {0, 1, 2, 3})


def test_sampled_tokens_do_not_depend_on_how_the_default_order_is_written():
    """The list of all steps in their own order is the default."""
    params = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 8}
    listed = ("penalties", "temperature", "top_k", "top_p", "min_p")
    row = np.random.default_rng(1).normal(0, 2, 300).astype(np.float32)
    one = sampler_of(vocab_size=300, prompt=[1, 2, 3], **params)
    other = sampler_of(vocab_size=300, prompt=[1, 2, 3], samplers=listed, **params)

    for position in range(100):
        assert one.sample(row.copy(), position).token_id == other.sample(row.copy(), position).token_id
