import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enginehouse.contract.errors import GenerationFailed, InvalidRequest
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.sampler import SequenceSampler

from .reference import changed_logits, chi_square_z, distribution, draw, ordered

VOCAB_SIZE = 40
rows = hnp.arrays(
    np.float32,
    VOCAB_SIZE,
    elements=st.one_of(st.floats(-40, 40, width=32), st.integers(-2, 2).map(float), st.just(-np.inf)),
)
token_ids = st.integers(0, VOCAB_SIZE - 1)
texts = st.lists(token_ids, max_size=12)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 39, 40, 500]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100, -3, 2.5, 100]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    num_logprobs=st.sampled_from([None, 0, 4]),
)


def sampler_for(params, choice=0, prompt=(), vocab_size=VOCAB_SIZE):
    return SequenceSampler(params, choice=choice, vocab_size=vocab_size, prompt_token_ids=prompt)


@given(rows, all_params, texts, texts, st.integers(0, 3), st.integers(0, 10**6))
def test_sample_agrees_with_the_reference(row, params, prompt, answer, choice, position):  # noqa: PLR0917
    """Every step of the specification, alone and together, on rows with ties and impossible tokens."""
    logits = changed_logits(row, params, prompt, answer)
    assume(row.max() > -np.inf and ordered(logits))
    gaps = np.diff(np.unique([logit for logit in logits if logit > -np.inf]))
    assume((gaps > 1e-4).all())  # float32 may order closer ones differently than the reference
    sampler = sampler_for(params, choice, prompt)
    for token_id in answer:
        sampler.accept(token_id)
    sampled = sampler.sample(row.copy(), position)

    assert sampled.token_id == draw(logits, params, choice, position)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of 0.625 and 0.375; top-p first would leave two
        ({"top_p": 0.83, "min_p": 0.2}, {0, 1, 2}),  # 0.95 reached with three; min-p first would leave two
        ({"top_k": 3, "min_p": 0.25}, {0, 1, 2}),
    ],
    ids=str,
)
def test_truncation_steps_run_in_the_specified_order(params, kept):
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    sampler = sampler_for(SamplingParams(**params), vocab_size=4)

    assert {sampler.sample(row.copy(), position).token_id for position in range(100)} == kept


@given(rows)
def test_greedy_is_argmax_with_the_lowest_id(row):
    assume(row.max() > -np.inf)
    sampler = sampler_for(SamplingParams(temperature=0, top_k=3, top_p=0.5))

    assert sampler.sample(row.copy(), 0).token_id == int(np.flatnonzero(row == row.max())[0])


@given(rows, all_params)
def test_sample_changes_no_state_and_knows_no_history_but_the_accepted_tokens(row, params):
    """Two samplers used in turn, one of them for other rows in between, agree: batches do not matter."""
    assume(row.max() > -np.inf)
    one, other = sampler_for(params), sampler_for(params)
    for position, token_id in enumerate([3, 1, 3, 7]):
        for _ in range(position):
            _sample_or_none(one, -row[::-1].copy(), position + 100)

        assert _sample_or_none(one, row.copy(), position) == _sample_or_none(other, row.copy(), position)
        one.accept(token_id)
        other.accept(token_id)


def _sample_or_none(sampler, row, position):
    try:
        sampled = sampler.sample(row, position)
    except GenerationFailed:
        return None
    top = None if sampled.top_ids is None else (sampled.top_ids.tolist(), sampled.top_logprobs.tolist())
    return sampled.token_id, sampled.logprob, top


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 12},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "logit_bias": {0: -100, 5: 3.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("varied", ["seed", "position", "choice"])
def test_draws_follow_the_distribution(params, varied):
    """Chi-square over seeds of one position, positions of one seed, choices of one request."""
    row = np.random.default_rng(0).normal(0, 2, 60).astype(np.float32)
    counts = np.zeros(60)
    for value in range(4000):
        place = {"seed": 1, "position": 2, "choice": 3} | {varied: value}
        sampler = sampler_for(SamplingParams(seed=place["seed"], **params), place["choice"], vocab_size=60)
        counts[sampler.sample(row.copy(), place["position"]).token_id] += 1
    ids, probabilities = distribution(changed_logits(row, SamplingParams(**params), [], []), SamplingParams(**params))

    assert counts[ids].sum() == counts.sum()
    assert abs(chi_square_z(counts[ids], probabilities)) < 4.5


def test_choices_and_seeds_give_different_texts():
    row = np.random.default_rng(0).normal(0, 1, VOCAB_SIZE).astype(np.float32)

    def text(seed, choice):
        sampler = sampler_for(SamplingParams(seed=seed), choice)
        return tuple(sampler.sample(row.copy(), position).token_id for position in range(20))

    texts = {text(seed, choice) for seed in range(10) for choice in range(4)}
    assert len(texts) == 40


@given(rows, all_params)
def test_logprobs_are_of_the_raw_model(row, params):
    """Before bias, penalties and temperature; the best first; the drawn token always, however unlikely."""
    assume(row.max() > -np.inf)
    sampler = sampler_for(params, prompt=[1, 2, 3])
    sampler.accept(4)
    try:
        sampled = sampler.sample(row.copy(), 0)
    except GenerationFailed:
        assume(False)
    exact = row.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    if params.num_logprobs is None:
        assert sampled.logprob is None
        assert sampled.top_ids is None
        assert sampled.top_logprobs is None
        return

    best = ordered(exact)[: params.num_logprobs]
    assert sampled.logprob == pytest.approx(max(logprobs[sampled.token_id], -9999.0), abs=1e-5)
    assert sampled.top_ids.tolist() == best
    np.testing.assert_allclose(sampled.top_logprobs, logprobs[best], atol=1e-5)
    assert sampled.logprob <= 0
    assert (sampled.top_logprobs <= 0).all()


@given(rows, all_params, texts)
def test_probabilities_after_sampling_are_those_of_the_draw(row, params, prompt):
    """The best first, and no others than can be drawn; greedy draws have one of probability 1."""
    params = msgspec.structs.replace(params, num_logprobs=5, post_sampling_probs=True)
    logits = changed_logits(row, params, prompt, [])
    assume(row.max() > -np.inf and ordered(logits))
    gaps = np.diff(np.unique([logit for logit in logits if logit > -np.inf]))
    assume((gaps > 1e-4).all())
    sampled = sampler_for(params, prompt=prompt).sample(row.copy(), 7)
    if params.temperature == 0:
        ids = ordered(logits)
        probabilities = np.array([1.0] + [0.0] * (len(ids) - 1))
    else:
        ids, probabilities = distribution(logits, params)

    assert sampled.token_id == draw(logits, params, 0, 7)
    assert sampled.top_ids.tolist() == ids[:5]
    np.testing.assert_allclose(np.exp(sampled.top_logprobs), probabilities[:5], atol=1e-5)
    assert np.exp(sampled.logprob) == pytest.approx(probabilities[ids.index(sampled.token_id)], abs=1e-5)


def test_forced_token_has_its_raw_logprob():
    row = np.zeros(VOCAB_SIZE, np.float32)
    row[3] = 10
    sampled = sampler_for(SamplingParams(logit_bias={7: 100}, num_logprobs=1)).sample(row, 0)

    assert sampled.token_id == 7
    assert sampled.logprob == pytest.approx(-10 - np.log1p(39 * np.exp(-10.0)), abs=1e-5)
    assert sampled.top_ids.tolist() == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", [{}, {"num_logprobs": 2}, {"logit_bias": {1: 100}}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([np.nan, 1.0, 2.0], "returned nan among its logits"),
        ([1.0, 5.0, np.nan], "returned nan among its logits"),
        ([np.inf, 1.0, 2.0], "returned inf among its logits"),
        ([-np.inf, -np.inf, -np.inf], "no token a finite logit"),
    ],
)
def test_broken_rows_fail_with_a_reason(values, problem, params, temperature):
    sampler = sampler_for(SamplingParams(temperature=temperature, **params), vocab_size=3)
    sampler.accept(0)
    with pytest.raises(GenerationFailed, match=problem):
        sampler.sample(np.array(values, np.float32), 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_that_bans_everything_fails_with_a_reason(temperature):
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(3), -100))
    with pytest.raises(GenerationFailed, match="logit_bias bans every token"):
        sampler_for(params, vocab_size=3).sample(np.zeros(3, np.float32), 0)


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidRequest, match="40"):
        sampler_for(SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e36])
def test_extreme_temperatures_and_logits_stay_in_range(temperature, scale):
    """Without a warning; a temperature near 0 is greedy."""
    row = (np.arange(VOCAB_SIZE) * np.float32(scale)).astype(np.float32)
    row[3] = -np.inf
    for params in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        sampled = sampler_for(SamplingParams(temperature=temperature, **params)).sample(row.copy(), 1)

        assert 0 <= sampled.token_id < VOCAB_SIZE
        assert sampled.token_id != 3
        if temperature < 1 and scale >= 1:
            assert sampled.token_id == VOCAB_SIZE - 1
