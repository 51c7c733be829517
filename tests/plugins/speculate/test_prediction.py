"""The drafter of predictions: follows one, and finds back into it after an edit."""

from __future__ import annotations

import numpy as np
import pytest

from enginehouse.contract.drafter import Draft, DraftContext, DraftTask
from enginehouse_speculate.prediction import PredictionDrafter, PredictionOptions
from enginehouse_testkit.fake_runner import FakeRunner

PROMPT = [900, 901]
PREDICTION = list(range(10, 60))


def drafted(answer: list[int], prediction: list[int] = PREDICTION, *, steps: list[int] | None = None) -> Draft | None:
    """What is proposed behind an answer that was seen after each of ``steps`` tokens."""
    drafter = PredictionDrafter().bind(DraftContext(FakeRunner(), 1), PredictionOptions())
    session = drafter.open(np.array(PROMPT, np.int32), prediction)
    draft = None
    for length in steps if steps is not None else [len(answer)]:
        text = np.array([*PROMPT, *answer[:length]], np.int32)
        (draft,) = drafter.propose([DraftTask(session, text, 0, 8)])
    return draft


def test_the_first_draft_is_the_beginning() -> None:
    draft = drafted([])

    assert draft is not None and list(draft.token_ids) == PREDICTION[:8]


@pytest.mark.parametrize("steps", [[5], [1, 2, 3, 4, 5], [2, 5]])
def test_a_draft_goes_on_where_the_answer_is(steps: list[int]) -> None:
    draft = drafted(PREDICTION[:5], steps=steps)

    assert draft is not None and list(draft.token_ids) == PREDICTION[5:13]


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        ([*PREDICTION[:5], 700, *PREDICTION[6:9]], 9),  # one token replaced
        ([*PREDICTION[:5], 700, 701, 702, *PREDICTION[5:8]], 8),  # some inserted
        ([*PREDICTION[:5], *PREDICTION[20:24]], 24),  # a part left out
    ],
)
def test_it_finds_back_after_an_edit(edit: list[int], place: int) -> None:
    draft = drafted(edit)

    assert draft is not None and list(draft.token_ids) == PREDICTION[place : place + 8]


def test_right_behind_a_replaced_token_the_next_one_is_tried() -> None:
    draft = drafted([*PREDICTION[:5], 700])

    assert draft is not None and draft.token_ids[0] == PREDICTION[6] and draft.grade == 0


def test_the_longer_it_agrees_the_surer_it_is() -> None:
    grades = [draft.grade for length in (2, 8, 32) if (draft := drafted(PREDICTION[:length]))]

    assert grades == sorted(set(grades)) and len(grades) == 3


def test_without_a_prediction_there_is_no_session() -> None:
    drafter = PredictionDrafter().bind(DraftContext(FakeRunner(), 1), PredictionOptions())

    assert drafter.open(np.array(PROMPT, np.int32), ()) is None


def test_behind_its_end_there_is_no_draft() -> None:
    assert drafted(PREDICTION) is None
    assert drafted([*PREDICTION, 1, 2, 3]) is None
