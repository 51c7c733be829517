"""Rows of float32 as JSON: every number comes back to the bit."""

from __future__ import annotations

import base64
import json
import threading

import numpy as np
import pytest

from enginehouse.contract import vectors
from enginehouse.contract.vectors import write_vectors

EDGES = [0.0, -0.0, 1.0, 0.1, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, 16777216.0, 16777217.0, 1 / 3, 9.99999999e-5]


async def test_numbers_come_back_to_the_bit() -> None:
    bits = np.random.default_rng(17).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(EDGES, np.float32), bits[np.isfinite(bits)]])
    rows = numbers[: len(numbers) // 100 * 100].reshape(100, -1)
    written = [bytes(row) for row in await write_vectors(rows)]
    read = np.array([json.loads(row) for row in written], np.float64).astype(np.float32)

    assert (read.view(np.uint32) == rows.view(np.uint32)).all()
    assert max(len(row) for row in written) < 17 * rows.shape[1]  # nine digits, a point, a sign and an exponent


async def test_base64_is_that_of_little_endian_bytes() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    written = [json.loads(bytes(row)) for row in await write_vectors(rows, "base64")]

    assert [base64.b64decode(row) for row in written] == [row.astype("<f4").tobytes() for row in rows]


@pytest.mark.parametrize(("num_rows", "is_aside"), [(1, False), (100, True)])
async def test_many_numbers_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, is_aside: bool
) -> None:
    places: list[bool] = []
    encode = np.round

    def noted(*arguments: object) -> object:
        places.append(threading.current_thread() is not threading.main_thread())
        return encode(*arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(vectors.np, "round", noted)
    await write_vectors(np.ones((num_rows, 384), np.float32))

    assert set(places) == {is_aside}
