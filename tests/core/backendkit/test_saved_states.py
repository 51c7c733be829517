"""The head of saved sequences: it says how many tokens there are, and refuses what is not as it was written."""

from __future__ import annotations

import pytest

from enginehouse.contract.errors import StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, check_head, state_body, write_head

_BODY = bytes(range(100))


def _state(num_tokens: int = 7, num_checked: int = 0) -> bytearray:
    data = bytearray(HEAD_BYTES) + _BODY
    write_head(memoryview(data), "format", num_tokens, num_checked=num_checked)
    return data


def test_the_head_says_how_many_tokens_there_are() -> None:
    data = memoryview(_state())

    assert check_head(data, "format") == 7
    assert state_body(data) == _BODY


@pytest.mark.parametrize("num_checked", [0, 30, 100, 5000])
def test_every_byte_of_the_head_and_of_what_is_checked_counts(num_checked: int) -> None:
    data = _state(num_checked=num_checked)
    for place in range(HEAD_BYTES + min(num_checked, len(_BODY))):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(StateRefused):
            check_head(memoryview(damaged), "format")

    assert check_head(memoryview(bytes(data)), "format") == 7


@pytest.mark.parametrize("num_bytes", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 99, HEAD_BYTES + 101])
def test_another_size_is_refused(num_bytes: int) -> None:
    data = (_state() + b"\0\0")[:num_bytes]
    with pytest.raises(StateRefused):
        check_head(memoryview(data), "format")


def test_other_settings_are_refused_by_name() -> None:
    with pytest.raises(StateRefused, match="other settings"):
        check_head(memoryview(_state()), "another format")


def test_a_state_of_no_tokens_is_none() -> None:
    with pytest.raises(StateRefused):
        check_head(memoryview(_state(num_tokens=0)), "format")
