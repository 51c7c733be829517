"""What llama.cpp's return codes mean in Enginehouse's words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StepAborted

__all__ = ["ERRORS", "DecodeCode", "is_unchanged"]


class DecodeCode(IntEnum):
    """What ``llama_decode`` returns, from its comment in llama.h."""

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
"""Each code but OK to the error it becomes; unknown codes become RunnerError too."""


def is_unchanged(code: int) -> bool:
    """Whether llama.cpp left all sequences as they were. Otherwise some may have grown: ask for their lengths."""
    return code in (DecodeCode.NO_SLOT, DecodeCode.INVALID_BATCH)
