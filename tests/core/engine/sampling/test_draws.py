import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine.sampling.candidates import pick, uniform

from .reference import chi_square_z

integers = st.integers(-(2**70), 2**70)


@given(integers, st.integers(0, 200), st.integers(0, 10**6), st.text(max_size=5))
def test_uniform_is_a_function_of_its_arguments(seed, choice, position, purpose):
    number = uniform(seed, choice, position, purpose)

    assert 0 <= number < 1
    assert number == uniform(seed, choice, position, purpose)


def test_uniform_has_known_values():
    """Texts of a seed must not change from one version to the next."""
    assert uniform(0, 0, 0) == 0.1296456182997474
    assert uniform(2**63, 3, 12345) == 0.6650388814791593
    assert uniform(7, 0, 1, "xtc") == 0.05550264172524799


@pytest.mark.parametrize(
    "numbers",
    [
        lambda: [uniform(seed, 0, 5) for seed in range(20000)],
        lambda: [uniform(5, choice, 0) for choice in range(20000)],
        lambda: [uniform(5, 0, position) for position in range(20000)],
        lambda: [uniform(value, value, value) for value in range(20000)],
        lambda: [uniform(5, 0, 1, str(purpose)) for purpose in range(20000)],
    ],
    ids=["seed", "choice", "position", "diagonal", "purpose"],
)
def test_uniform_is_uniform_and_uncorrelated_in_each_argument(numbers):
    numbers = np.array(numbers())
    counts = np.histogram2d(numbers[:-1], numbers[1:], bins=12, range=[[0, 1], [0, 1]])[0].ravel()

    assert abs(chi_square_z(counts, np.full(counts.size, 1 / counts.size))) < 4


def test_uniform_distinguishes_equal_sums_of_arguments():
    numbers = {uniform(seed, choice, 10 - seed - choice) for seed in range(5) for choice in range(5)}

    assert len(numbers) == 25


def test_pick_follows_the_weights():
    weights = np.array([0.5, 0.0, 3.0, 0.25, 1.25])
    indices = [pick(weights, uniform(seed, 0, 0)) for seed in range(20000)]
    counts = np.bincount(indices, minlength=5)

    assert counts[1] == 0
    assert abs(chi_square_z(counts, weights / weights.sum())) < 4


def test_pick_never_takes_an_impossible_last_token():
    """The largest number below one times the sum may round up to the sum."""
    weights = np.array([1e-300, 1.0, 0.0, 0.0])

    assert pick(weights, 1 - 2.0**-53) == 1
    assert pick(weights, 0.0) == 0
