import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enginehouse.engine.sampling.candidates import LogitRow, bounded_by_mass, bounded_by_ratio

from .reference import chi_square_z, ordered

values = st.one_of(
    st.floats(-60, 60, width=32),
    st.integers(-3, 3).map(float),  # many ties
    st.just(-np.inf),
    st.sampled_from([-0.0, 0.0]),
)
small_rows = hnp.arrays(np.float32, st.integers(1, 80), elements=values).filter(lambda row: row.max() > -np.inf)


def _large_row(seed, size, spread, digits):
    row = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    return row if digits is None else row.round(digits)


large_rows = st.builds(
    _large_row,
    st.integers(0, 2**32),
    st.sampled_from([1500, 6000]),
    st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]),
    st.sampled_from([None, 0]),
)
rows = st.one_of(small_rows, large_rows)
temperatures = st.sampled_from([1e-9, 0.1, 0.7, 1.0, 2.0, 50.0])


def row_of(logits, temperature=1.0):
    return LogitRow(logits, float(logits.max()), temperature)


def reference_weights(logits, ids, temperature):
    return np.exp((logits[ids].astype(np.float64) - float(logits.max())) / temperature)


@given(rows, st.integers(1, 300))
def test_top_is_exactly_the_best_tokens(logits, count):
    before = logits.copy()

    assert row_of(logits).top(count).token_ids.tolist() == ordered(logits)[:count]
    np.testing.assert_array_equal(logits, before)


@given(rows)
def test_whole_is_every_token_that_can_be_drawn(logits):
    assert row_of(logits).whole().token_ids.tolist() == ordered(logits)


@given(rows, temperatures, st.floats(0, 1))
def test_nucleus_is_the_smallest_set_that_reaches_the_mass(logits, temperature, mass):
    ids = ordered(logits)
    sums = np.cumsum(reference_weights(logits, ids, temperature))
    with np.errstate(over="ignore"):
        head = row_of(logits, temperature).nucleus(mass)

    assert head.token_ids.tolist() == ids[: len(head)]
    assert sums[len(head) - 1] >= mass * sums[-1] * (1 - 1e-12)
    assert len(head) == 1 or sums[len(head) - 2] < mass * sums[-1] * (1 + 1e-12)


def test_nucleus_is_exact_where_float32_is_not():
    """Each of 300,000 tokens has less than the rounding error of a float32 sum."""
    logits = np.random.default_rng(1).normal(0, 0.01, 300_000).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    sums = np.cumsum(weights[np.lexsort((np.arange(logits.size), -logits))])
    for place in np.linspace(1000, 290_000, 20).astype(int):
        share = sums[place] / weights.sum()

        assert len(row_of(logits).nucleus(share * (1 - 1e-10))) == place + 1
        assert len(row_of(logits).nucleus(share * (1 + 1e-10))) == place + 2


@given(rows, temperatures, st.floats(1e-9, 1))
def test_at_least_keeps_tokens_by_their_share_of_the_best(logits, temperature, ratio):
    ids = ordered(logits)
    weights = reference_weights(logits, ids, temperature)
    with np.errstate(over="ignore"):
        head = row_of(logits, temperature).at_least(ratio)

    assert head.token_ids.tolist() == np.array(ids)[weights >= ratio].tolist()


@given(rows, temperatures, st.floats(0, 1, exclude_max=True))
def test_draw_is_the_inverse_of_the_running_sum(logits, temperature, number):
    ids = ordered(logits)
    sums = np.cumsum(reference_weights(logits, ids, temperature))
    with np.errstate(over="ignore"):
        place = ids.index(row_of(logits, temperature).draw(number))

    before = sums[place - 1] if place else 0.0
    assert before <= number * sums[-1] + 1e-6 * sums[-1]
    assert sums[place] >= number * sums[-1] - 1e-6 * sums[-1]


@pytest.mark.parametrize("temperature", np.linspace(0.3, 2, 40))
def test_at_least_keeps_a_token_that_has_exactly_the_share(temperature):
    """The threshold on logits is rounded, the decision is not; near a logit of 0 it matters."""
    logits = np.array([1.0, 0.5, 1e-20, -3.0], np.float32)
    share = reference_weights(logits, [2], temperature)[0]

    assert row_of(logits, temperature).at_least(share).token_ids.tolist() == [0, 1, 2]


def test_draw_takes_the_last_token_at_the_end_of_the_sum():
    """Whichever way the total was rounded."""
    for seed in range(30):
        logits = _large_row(seed, 3000, 1.0, None)
        place = ordered(logits).index(row_of(logits).draw(1 - 2.0**-53))

        assert place >= 2990


def test_draw_never_takes_an_impossible_token():
    logits = np.array([0.0, -np.inf, -200.0, -np.inf], np.float32)

    assert {row_of(logits).draw(number) for number in (0.0, 0.5, 1 - 2.0**-53)} == {0}


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_draw_follows_the_probabilities_of_a_whole_row(spread):
    """Also of a flat row, where the interesting token is anywhere."""
    logits = np.random.default_rng(3).normal(0, spread, 5000).astype(np.float32)
    numbers = np.random.default_rng(4).random(6000)
    row = row_of(logits)
    counts = np.bincount([row.draw(number) for number in numbers], minlength=logits.size)
    weights = reference_weights(logits, np.arange(logits.size), 1.0)
    bins = np.arange(logits.size) % 50  # 5000 cells would expect too few

    probabilities = np.bincount(bins, weights / weights.sum())
    assert abs(chi_square_z(np.bincount(bins, counts), probabilities)) < 4


@given(small_rows, st.floats(0, 1), st.floats(1e-6, 1))
def test_later_steps_renormalise(logits, mass, ratio):
    head = row_of(logits).whole()[1:] if len(ordered(logits)) > 1 else row_of(logits).whole()
    if not head.weights.sum():
        return
    shares = head.weights / head.weights.sum()
    kept = bounded_by_mass(head, mass)

    assert shares[: len(kept)].sum() >= mass - 1e-12
    assert len(kept) == 1 or shares[: len(kept) - 1].sum() < mass + 1e-12
    assert len(bounded_by_ratio(head, ratio)) == int((head.weights >= ratio * head.weights[0]).sum())
