import numpy as np
import pytest

from enginehouse.contract.errors import GenerationFailed
from enginehouse.engine.constraints import TokenMask


def allowed(mask, num_tokens=40):
    logits = np.zeros(num_tokens, np.float32)
    mask.apply(logits)
    return set(np.flatnonzero(logits > -np.inf).tolist())


def test_bitmask_and_ban_both_hold():
    bitmask = np.array([0b1011, 0b1], np.int32)

    assert allowed(TokenMask(bitmask)) == {0, 1, 3, 32}
    assert allowed(TokenMask(bitmask, frozenset({1, 2}))) == {0, 3, 32}
    assert allowed(TokenMask(banned=frozenset({5, 39}))) == set(range(40)) - {5, 39}
    assert allowed(TokenMask.only(33, 40)) == {33}


def test_ban_gives_way_where_the_bitmask_allows_nothing_else():
    """A text that is complete can only end, however few tokens it has."""
    assert allowed(TokenMask(np.array([0b100, 0], np.int32), frozenset({2, 7}))) == {2}


@pytest.mark.parametrize("mask", [TokenMask(np.zeros(2, np.int32)), TokenMask(banned=frozenset(range(40)))], ids=str)
def test_mask_that_allows_nothing_fails(mask):
    with pytest.raises(GenerationFailed, match="No allowed token"):
        allowed(mask)
