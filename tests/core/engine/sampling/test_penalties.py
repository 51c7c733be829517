import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.penalties import LogitBias, Penalties

from .reference import changed_logits

VOCAB_SIZE = 12
rows = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).map(
    lambda values: np.array(values, np.float32)
)
token_ids = st.integers(0, VOCAB_SIZE - 1)
texts = st.lists(token_ids, max_size=30)
biases = st.dictionaries(token_ids, st.sampled_from([-250, -100, -99.5, -1, 0, 0.5, 30, 99, 100, 300]), max_size=6)


@given(rows, biases)
def test_bias_adds_bans_and_forces(row, bias):
    expected = changed_logits(row, SamplingParams(logit_bias=bias), [], [])
    LogitBias(bias, VOCAB_SIZE).apply(row)

    np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-5)


def test_bias_names_every_id_outside_the_vocabulary():
    with pytest.raises(InvalidRequest, match="-1, 12, 99") as caught:
        LogitBias({3: 1.0, 12: 1.0, 99: 100, -1: -100}, VOCAB_SIZE)

    assert caught.value.param == "logit_bias"


penalty_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.1, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.6, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.3]),
    repeat_last_n=st.sampled_from([-1, 1, 2, 5, 40]),
)


@given(rows, texts, texts, penalty_params)
def test_penalties_agree_with_the_reference(row, prompt, answer, params):
    expected = changed_logits(row, params, prompt, answer)
    window = None if params.repeat_last_n < 0 else params.repeat_last_n
    penalties = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty, prompt, window)
    for token_id in answer:
        penalties.accept(token_id)
    penalties.apply(row)

    np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-4)


def test_penalties_keep_count_of_many_tokens():
    """More different tokens than there was room for at first."""
    row = np.zeros(1000, np.float32)
    penalties = Penalties(1.0, 1.0, 0.5, ())
    for token_id in [*range(500), *range(250)]:
        penalties.accept(token_id)
    penalties.apply(row)

    assert set(row[:250]) == {-2.0}
    assert set(row[250:500]) == {-1.5}
    assert set(row[500:]) == {0.0}
