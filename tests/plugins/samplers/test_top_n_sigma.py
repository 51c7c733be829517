import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_samplers.top_n_sigma import TopNSigmaFields, TopNSigmaSampler

SAMPLER = TopNSigmaSampler()
values = st.one_of(st.floats(-20, 20, width=32), st.just(-math.inf))
row_lists = st.lists(values, min_size=1, max_size=50).filter(lambda row: max(row) > -math.inf)


@given(row_lists, st.sampled_from([0.3, 1.0, 2.17]), st.sampled_from([0.5, 1.0, 3.0]))
def test_top_n_sigma_keeps_logits_near_the_largest(candidates_of, row, num_sigmas, temperature):
    """Whatever the temperature; banned tokens do not widen the deviation."""
    row = [float(np.float32(value)) for value in row]
    candidates = candidates_of(np.array(row, np.float32), temperature)
    keep = SAMPLER.create(TopNSigmaFields(top_n_sigma=num_sigmas))(candidates)
    kept = set(candidates.token_ids[keep].tolist())
    threshold = max(row) - num_sigmas * statistics.pstdev([value for value in row if value > -math.inf])

    assert {i for i, value in enumerate(row) if value >= threshold + 1e-9} <= kept
    assert kept <= {i for i, value in enumerate(row) if value >= threshold - 1e-9}


def test_top_n_sigma_keeps_a_token_when_the_largest_was_excluded(candidates_of):
    row = np.array([10.0, 1.0, 0.9, 0.0], np.float32)
    candidates = candidates_of(row)
    rest = type(candidates)(
        candidates.token_ids[1:], candidates.logits[1:], row, candidates.temperature, candidates.uniform
    )
    keep = SAMPLER.create(TopNSigmaFields(top_n_sigma=0.1))(rest)

    assert keep.tolist() == [True, False, False]


@pytest.mark.parametrize("value", [0.0, -1.0, -0.5])
def test_top_n_sigma_is_off_at_zero_and_below(value):
    assert SAMPLER.create(TopNSigmaFields()) is None
    assert SAMPLER.create(TopNSigmaFields(top_n_sigma=value)) is None


@pytest.mark.parametrize("value", [-1.5, math.nan])
def test_top_n_sigma_refuses_values_out_of_range(value):
    with pytest.raises(ValueError, match="top_n_sigma"):
        TopNSigmaFields(top_n_sigma=value)
