"""Maps llama.cpp's return codes to Enginehouse's errors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StepAborted

__all__ = ["ERRORS", "DecodeCode", "is_unchanged"]


class DecodeCode(IntEnum):
    """Return codes of ``llama_decode``, from its comment in llama.h."""

    OK = 0
    NO_SLOT = 1
    ABORTED = 2
    INVALID_BATCH = -1
    ALLOCATION_FAILED = -2
    COMPUTE_FAILED = -3


ERRORS: Mapping[int, type[RunnerError]] = {
    DecodeCode.NO_SLOT: CacheFull,
    DecodeCode.ABORTED: StepAborted,
    DecodeCode.INVALID_BATCH: InvalidSpan,
    DecodeCode.ALLOCATION_FAILED: RunnerError,
    DecodeCode.COMPUTE_FAILED: RunnerError,
}
"""Error for each code except OK; unknown codes also become RunnerError."""


def is_unchanged(code: int) -> bool:
    """True if llama.cpp left all sequences unchanged. Otherwise some may have grown: query their lengths."""
    return code in (DecodeCode.NO_SLOT, DecodeCode.INVALID_BATCH)
