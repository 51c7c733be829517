"""How large chunks become, from two timings."""

from __future__ import annotations

import pytest

from enginehouse_hf.cuda.chunks import chunk_size

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(
    ("small_s", "large_s", "expected"),
    [
        (0.027, 0.108, 768),  # tokens take all the time: 25 ms' worth of them
        (0.008, 0.016, 7424),  # 5.3 ms of launches, the rest for tokens
        (0.040, 0.041, 12288),  # launches take as long anyway: the tokens as long again
        (0.016, 0.016, 13312),  # tokens that seem to cost nothing are taken to cost a quarter of the time
        (0.400, 1.600, 256),  # never smaller
    ],
)
def test_a_chunk_takes_25_milliseconds(small_s: float, large_s: float, expected: int) -> None:
    assert chunk_size(1024, small_s, 4096, large_s) == expected


def test_one_timing_is_enough() -> None:
    assert chunk_size(512, 0.005, 512, 0.005) == 2560
