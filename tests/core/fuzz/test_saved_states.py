"""Damaged files of saved sequences: what was written comes back as it was, or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import numpy as np

from enginehouse.contract.errors import StateRefused
from enginehouse.engine.disk import StateFolder
from enginehouse.engine.disk.state_folder import digest
from enginehouse_backendkit.saved_states import HEAD_BYTES, check_head, write_head

from .damage import Amount, amounts, damage_bytes, run_damaged

_MODEL = digest(b"model")
_FORMAT = "library 1.0, f16"
_NUM_TOKENS = 100


def _state() -> bytes:
    data = bytearray(HEAD_BYTES) + bytes(range(256)) * 2
    write_head(memoryview(data), _FORMAT, _NUM_TOKENS, num_checked=len(data))
    return bytes(data)


@amounts(800)
def test_saved_sequences(amount: Amount, tmp_path: Path) -> None:
    token_ids = np.arange(_NUM_TOKENS, dtype=np.int32)
    state = _state()
    folder = StateFolder(tmp_path, _MODEL, 10**6, can_cut=True)
    assert folder.write(token_ids, "", memoryview(state))
    folder.close()
    (path,) = tmp_path.glob("*.state")
    right = path.read_bytes()

    def check(random: Random) -> None:
        path.write_bytes(right)
        before = random.random() < 0.5  # damaged before it is indexed, or after that
        damaged = damage_bytes(random, right)
        if before:
            path.write_bytes(damaged)
            if random.random() < 0.2:
                with path.open("ab") as file:
                    file.truncate(random.choice([0, 44, 2**20, 2**36]))
        opened = StateFolder(tmp_path, _MODEL, 10**6, can_cut=True)
        try:
            if not before:
                path.write_bytes(damaged)
            found = opened.find(token_ids, "")
            data = opened.read(found[0]) if found is not None else None
            assert data is None or (bytes(data) == state and path.read_bytes() == right)
        finally:
            opened.close()

    run_damaged("saved states", amount, check)


@amounts(3000)
def test_heads_of_runners_data(amount: Amount) -> None:
    """Everything is checked here, so every change is noticed."""
    right = _state()

    def check(random: Random) -> None:
        data = damage_bytes(random, right)
        with contextlib.suppress(StateRefused):
            assert check_head(memoryview(data), _FORMAT) == _NUM_TOKENS and data == right

    run_damaged("heads of states", amount, check)
