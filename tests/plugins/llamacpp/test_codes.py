"""Every return code of llama_decode has an error."""

from __future__ import annotations

import inspect
import re

import pytest

from enginehouse.contract.errors import CacheFull, InvalidSpan, RunnerError, StepAborted
from enginehouse_llamacpp.codes import ERRORS, DecodeCode, is_unchanged
from enginehouse_llamacpp.library import load_library

pytestmark = pytest.mark.llamacpp


def test_every_code_has_an_error() -> None:
    assert set(ERRORS) == set(DecodeCode) - {DecodeCode.OK}
    assert ERRORS[DecodeCode.NO_SLOT] is CacheFull
    assert ERRORS[DecodeCode.ABORTED] is StepAborted
    assert ERRORS[DecodeCode.INVALID_BATCH] is InvalidSpan
    assert all(issubclass(error, RunnerError) for error in ERRORS.values())


def test_no_code_is_missing() -> None:
    """The binding carries llama.h's list of codes as a comment above ``llama_decode``."""
    source = inspect.getsource(load_library().bindings)
    comment = source[: source.index("def llama_decode(")].rpartition("def llama_encode(")[2]
    codes = {int(code) for code in re.findall(r"^#\s*//\s+(-?\d+) - ", comment, re.MULTILINE)}

    assert codes - {0} <= {int(code) for code in DecodeCode}
    assert {1, 2, -1} <= codes


def test_only_refusals_leave_everything_as_it_was() -> None:
    """After the others some sequences may have grown."""
    assert [code for code in DecodeCode if is_unchanged(code)] == [DecodeCode.NO_SLOT, DecodeCode.INVALID_BATCH]
