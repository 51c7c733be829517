"""Predicted answers are compared token by token, whatever the answer does with them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.api.generation.choice_parser import MIN_RUN, PredictionCount

TOKENS = tuple(range(100, 120))
SHORT = st.lists(st.integers(0, 3), max_size=30)


def count(prediction, answer) -> tuple[int, int]:
    counted = PredictionCount(prediction)
    counted.push(answer)
    return counted.num_accepted, counted.num_rejected


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        (TOKENS, 20),
        ((), 0),
        (TOKENS[:7], 7),
        ((*TOKENS, 1, 2, 3), 20),
        # One token is replaced, some are inserted, some left out: both sides of the change count.
        ((*TOKENS[:10], 1, *TOKENS[11:]), 19),
        ((*TOKENS[:10], 1, 2, 3, *TOKENS[10:]), 20),
        ((*TOKENS[:5], *TOKENS[9:]), 16),
        # What comes before the prediction does not keep it from being found.
        ((7, 8, 9, *TOKENS), 20),
        # Fewer than a run agree by chance.
        ((1, *TOKENS[3 : 3 + MIN_RUN - 1], 2), 0),
        # Nothing is taken up again behind where it was left.
        ((*TOKENS[:10], 1, *TOKENS[:5]), 10),
        ((1, 2, 3, 4, 5), 0),
    ],
)
def test_runs(answer, accepted: int) -> None:
    assert count(TOKENS, answer) == (accepted, 20 - accepted)


def test_no_prediction_has_no_tokens() -> None:
    assert count((), (1, 2, 3, 4, 5)) == (0, 0)


@given(SHORT, SHORT)
def test_counts_are_bounded_and_do_not_depend_on_the_pieces(prediction: list[int], answer: list[int]) -> None:
    accepted, rejected = count(prediction, answer)
    piecewise = PredictionCount(prediction)
    for token_id in answer:
        piecewise.push((token_id,))

    assert (piecewise.num_accepted, piecewise.num_rejected) == (accepted, rejected)
    assert accepted + rejected == len(prediction)
    assert accepted <= len(answer)
    assert count(prediction, prediction) == (len(prediction), 0)


def test_repetition_costs_no_more_than_its_length() -> None:
    """Every place of the prediction looks like every other one."""
    began = time.process_time()
    count([1] * 50_000, [2] + [1, 1, 1, 1, 2] * 20_000)

    assert time.process_time() - began < 10
