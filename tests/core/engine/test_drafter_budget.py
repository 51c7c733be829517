"""The account of a drafter: whatever becomes of its drafts, it loses little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.engine.speculation.draft_length import DrafterBudget

LONGEST_STEP = 10.0
STEPS = st.lists(st.tuples(st.floats(0.0, 8.0), st.floats(1.0, LONGEST_STEP)), min_size=1, max_size=400)


@given(tries=STEPS)
def test_losses_stay_within_the_start_a_fiftieth_and_one_step(tries: list[tuple[float, float]]) -> None:
    """A drafter that wants to draft at every step, with any luck, in steps that last up to ten plain ones."""
    drafter_budget = DrafterBudget()
    num_plain, gained = 0, 0.0
    for saved, lasted in tries:
        if drafter_budget.is_open:
            drafter_budget.add_drafted(saved, 1.0, lasted, lasted, 1.0)
            gained += saved - (lasted - 1.0)
        else:
            drafter_budget.add_plain()
            num_plain += 1

    assert gained >= -(4.0 + 0.02 * num_plain + LONGEST_STEP)


def test_what_pays_stays_open_and_a_pause_ends() -> None:
    drafter_budget = DrafterBudget()
    for _ in range(100):
        drafter_budget.add_drafted(2.0, 1.0, 2.0, 2.0, 1.0)
        assert drafter_budget.is_open
    for _ in range(40):
        drafter_budget.add_drafted(0.0, 1.0, 3.0, 3.0, 1.0)
    assert not drafter_budget.is_open
    for _ in range(5000):
        drafter_budget.add_plain()

    assert drafter_budget.is_open


def test_a_disturbed_step_is_not_the_drafts_fault() -> None:
    drafter_budget = DrafterBudget()
    drafter_budget.add_drafted(1.0, 1.0, seconds=500.0, usual_s=2.0, plain_s=1.0)

    assert drafter_budget.balance == pytest.approx(4.0 + 1.0 - 3.0)


def test_a_disturbed_draft_costs_twice_the_usual_at_most() -> None:
    drafter_budget = DrafterBudget()
    drafter_budget.add_proposing(seconds=500.0, usual_s=0.5, plain_s=1.0)

    assert drafter_budget.balance == pytest.approx(4.0 - 1.0)


def test_of_a_shared_step_each_drafter_pays_its_share() -> None:
    drafter_budget = DrafterBudget()
    drafter_budget.add_drafted(0.5, 0.25, seconds=3.0, usual_s=3.0, plain_s=1.0)

    assert drafter_budget.balance == pytest.approx(4.0 + 0.5 - 0.25 * 2.0)
