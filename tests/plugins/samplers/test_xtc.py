import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_samplers.xtc import XtcFields, XtcSampler

SAMPLER = XtcSampler()
row_lists = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=30)


@given(row_lists, st.sampled_from([0.0, 0.013, 0.1, 0.31, 0.5]))
def test_xtc_removes_likely_tokens_but_the_last(candidates_of, row, threshold):
    row = [float(np.float32(value)) for value in row]
    candidates = candidates_of(np.array(row, np.float32))
    keep = SAMPLER.create(XtcFields(xtc_probability=1.0, xtc_threshold=threshold))(candidates)
    total = sum(math.exp(value) for value in row)
    likely = [place for place, i in enumerate(candidates.token_ids) if math.exp(row[i]) / total >= threshold]

    near = any(abs(math.exp(value) / total - threshold) < 1e-6 for value in row) and threshold
    if not near:
        assert np.flatnonzero(~keep).tolist() == likely[:-1]


@pytest.mark.parametrize(("number", "acts"), [(0.0, True), (0.29, True), (0.3, False), (0.9, False)])
def test_xtc_acts_with_its_probability(candidates_of, number, acts):
    row = np.array([1.0, 1.0, 0.9, -3.0], np.float32)
    keep = SAMPLER.create(XtcFields(xtc_probability=0.3))(candidates_of(row, number=number))

    assert keep.tolist() == ([False, False, True, True] if acts else [True] * 4)


def test_xtc_leaves_a_single_likely_token(candidates_of):
    keep = SAMPLER.create(XtcFields(xtc_probability=1.0))(candidates_of(np.array([9.0, 0.0, 0.0], np.float32)))

    assert keep.all()


def test_xtc_is_off_without_probability():
    assert SAMPLER.create(XtcFields()) is None
    assert SAMPLER.create(XtcFields(xtc_threshold=0.2)) is None


@pytest.mark.parametrize(
    "values",
    [
        {"xtc_probability": -0.1},
        {"xtc_probability": 1.1},
        {"xtc_probability": math.nan},
        {"xtc_threshold": -0.1},
        {"xtc_threshold": 0.6},
    ],
)
def test_xtc_refuses_values_out_of_range(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        XtcFields(**values)
