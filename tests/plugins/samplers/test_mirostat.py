import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler
from enginehouse_samplers.mirostat import MirostatFields, MirostatSampler

SAMPLER = MirostatSampler()
row_lists = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50)


def step_of(**fields):
    return SAMPLER.create(MirostatFields(mirostat=2, **fields))


@given(row_lists, st.sampled_from([0.1, 1.3, 5.0]))
def test_mirostat_keeps_tokens_that_do_not_surprise_more_than_mu(candidates_of, row, tau):
    row = [float(np.float32(value)) for value in row]
    total = sum(math.exp(value) for value in row)
    surprises = [-math.log2(math.exp(value) / total) for value in row]
    candidates = candidates_of(np.array(row, np.float32))
    keep = step_of(mirostat_tau=tau)(candidates)
    kept = set(candidates.token_ids[keep].tolist())

    assert {i for i, surprise in enumerate(surprises) if surprise < 2 * tau - 1e-6} <= kept
    best = int(candidates.token_ids[0])
    assert kept <= {i for i, surprise in enumerate(surprises) if surprise < 2 * tau + 1e-6} | {best}
    assert best in kept


def test_mirostat_corrects_mu_by_the_surprise_of_what_was_drawn():
    step = step_of(mirostat_tau=3.0, mirostat_eta=0.5)
    assert step.mu == 6.0
    step.accept(1, 1 / 4)  # two bits, one too few
    assert step.mu == pytest.approx(6.5)
    step.accept(1, 1 / 64)
    assert step.mu == pytest.approx(5.0)
    step.accept(1, None)  # forced
    assert step.mu == pytest.approx(5.0)


class Kept(MirostatSampler):
    """Keeps the step that it made."""

    def create(self, fields):
        self.step = super().create(fields)
        return self.step


@pytest.mark.parametrize("tau", [2.0, 4.0, 6.0])
def test_mirostat_brings_the_surprise_of_a_text_to_the_target(tau):
    """Over rows that are flatter than the target: their own surprise is 8.3 bits."""
    rows = np.random.default_rng(0).normal(0, 1, (50, 500)).astype(np.float32)
    plugin = Kept()
    params = SamplingParams(extensions={"mirostat": {"mirostat": 2, "mirostat_tau": tau}}, seed=1)
    sampler = SequenceSampler(params, choice=0, vocab_size=500, steps=build_steps(params, {"mirostat": plugin}))
    surprises = []
    for position in range(800):
        mu = plugin.step.mu
        sampler.accept(sampler.sample(rows[position % 50].copy(), position).token_id)
        surprises.append(tau + (mu - plugin.step.mu) / 0.1)

    assert np.mean(surprises[100:]) == pytest.approx(tau, abs=0.15)


def test_mirostat_is_off_by_default():
    assert SAMPLER.create(MirostatFields()) is None
    assert SAMPLER.create(MirostatFields(mirostat_tau=2.0)) is None


@pytest.mark.parametrize(
    ("row", "tau", "num_kept"),
    [
        ([2.0], 5.0, 1),
        ([1.0, 1.0, 1.0], 0.4, 1),  # equal: Zipf's exponent is 0
        ([1.0, 1.0, 1.0], 5.0, 3),
        ([300.0, 0.0, -300.0], 5.0, 1),  # so steep that its powers overflow
        ([float(-np.log(rank)) for rank in range(1, 9)], 1.0, 1),  # an exponent of 1, where the formula is 0 / 0
    ],
)
def test_mirostat_one_takes_the_limit_where_its_formula_has_no_value(candidates_of, row, tau, num_kept):
    step = SAMPLER.create(MirostatFields(mirostat=1, mirostat_tau=tau))
    keep = step(candidates_of(np.array(row, np.float32)))

    assert keep.sum() == num_kept
    assert keep[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 3),
        ("mirostat", -2),
        ("mirostat_tau", -0.1),
        ("mirostat_tau", math.nan),
        ("mirostat_eta", -0.1),
        ("mirostat_eta", 1.1),
    ],
)
def test_mirostat_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        MirostatFields(**{field: value})
