import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_samplers.typical_p import TypicalFields, TypicalSampler

SAMPLER = TypicalSampler()
row_lists = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=50)


def reference(logits, mass):
    """Ids by how far their surprise is from the entropy, until their probability reaches the mass."""
    total = sum(math.exp(logit) for logit in logits)
    probabilities = [math.exp(logit) / total for logit in logits]
    entropy = -sum(p * math.log(p) for p in probabilities)
    order = sorted(range(len(logits)), key=lambda i: (abs(-math.log(probabilities[i]) - entropy), -logits[i], i))
    kept, reached = set(), 0.0
    for i in order:
        kept.add(i)
        reached += probabilities[i]
        if reached >= mass:
            break
    return kept


@given(row_lists, st.sampled_from([0.05, 0.37, 0.731, 0.95, 0.9999]))
def test_typical_keeps_the_set_of_the_paper(candidates_of, row, mass):
    candidates = candidates_of(np.array(row, np.float32))
    keep = SAMPLER.create(TypicalFields(typical_p=mass))(candidates)
    kept = set(candidates.token_ids[keep].tolist())
    values = sorted(set(row))
    gaps = [right - left for left, right in pairwise(values)]

    if not gaps or min(gaps) > 1e-3:
        expected = reference([float(np.float32(value)) for value in row], mass)
        if len(kept) == len(expected):
            assert _surprises(row, kept) == pytest.approx(_surprises(row, expected), abs=1e-6)
        else:  # equal surprises on both sides of the border
            assert abs(len(kept) - len(expected)) <= 1


def _surprises(row, ids):
    total = sum(math.exp(value) for value in row)
    logprobs = [value - math.log(total) for value in row]
    entropy = -sum(math.exp(logprob) * logprob for logprob in logprobs)
    return sorted(abs(-logprobs[i] - entropy) for i in ids)


def test_typical_may_drop_the_most_probable_token(candidates_of):
    """One token of 0.3 among 700 equal ones: it is far less surprising than expected."""
    row = np.zeros(701, np.float32)
    row[5] = math.log(300)
    keep = SAMPLER.create(TypicalFields(typical_p=0.4995))(candidates_of(row))

    assert not keep[0]
    assert keep.sum() == 500


def test_typical_handles_impossible_candidates(candidates_of):
    row = np.array([0.0, -1.0, -800.0], np.float32)
    keep = SAMPLER.create(TypicalFields(typical_p=0.9))(candidates_of(row))

    assert keep.any()
    assert not keep[2]


def test_typical_is_off_by_default():
    assert SAMPLER.create(TypicalFields()) is None


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, math.nan])
def test_typical_refuses_values_out_of_range(value):
    with pytest.raises(ValueError, match="typical_p"):
        TypicalFields(typical_p=value)
