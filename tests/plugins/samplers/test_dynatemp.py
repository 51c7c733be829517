import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_samplers.dynatemp import DynatempFields, DynatempSampler

SAMPLER = DynatempSampler()
row_lists = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=50)


def temperature_of(row, temperature, span, exponent=1.0):
    step = SAMPLER.create(DynatempFields(dynatemp_range=span, dynatemp_exponent=exponent))
    return step.temperature(np.array(row, np.float32), temperature)


@given(row_lists, st.sampled_from([0.2, 1.0, 1.7]), st.sampled_from([0.1, 0.5, 2.0]), st.sampled_from([0.5, 1.0, 2.5]))
def test_dynatemp_follows_the_relative_entropy(row, temperature, span, exponent):
    total = sum(math.exp(logit) for logit in row)
    probabilities = [math.exp(logit) / total for logit in row]
    entropy = -sum(p * math.log(p) for p in probabilities if p) / math.log(len(row))
    low, high = max(0.0, temperature - span), temperature + span

    found = temperature_of(row, temperature, span, exponent)

    assert low <= found <= high
    if entropy > 1e-3:  # below, powers magnify rounding errors
        assert found == pytest.approx(low + (high - low) * entropy**exponent, rel=1e-3, abs=1e-4)


def test_dynatemp_reaches_both_ends():
    assert temperature_of([0.0] * 10, 0.8, 0.5) == pytest.approx(1.3)
    assert temperature_of([0.0] + [-90.0] * 9, 0.8, 0.5) == pytest.approx(0.3)
    assert temperature_of([0.0] + [-90.0] * 9, 0.8, 1.5) == pytest.approx(0.0, abs=1e-6)


def test_dynatemp_leaves_a_single_token_alone():
    assert temperature_of([1.0], 0.8, 0.5) == 0.8


def test_dynatemp_is_off_without_range():
    assert SAMPLER.create(DynatempFields()) is None
    assert SAMPLER.create(DynatempFields(dynatemp_exponent=2.0)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dynatemp_range", -0.1),
        ("dynatemp_range", 2.1),
        ("dynatemp_range", math.nan),
        ("dynatemp_exponent", -1.0),
        ("dynatemp_exponent", 11.0),
    ],
)
def test_dynatemp_refuses_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        DynatempFields(**{field: value})
