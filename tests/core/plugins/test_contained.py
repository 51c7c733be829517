"""The guard of core's own work: an error fails what it belongs to, and nothing else."""

from __future__ import annotations

import pytest

from enginehouse.contract.errors import EnginehouseError, GenerationFailed, InvalidRequest
from enginehouse.plugins import Contained


def test_errors_of_the_contract_are_given_on_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[EnginehouseError] = []
    error = InvalidRequest("it is too long")
    with Contained(failed.append, "checking the request failed"):
        raise error

    assert failed == [error]
    assert not caplog.records


def test_other_errors_are_logged_and_say_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[EnginehouseError] = []
    with Contained(failed.append, "checking the request failed"):
        raise KeyError("lost")

    (error,), (record,) = failed, caplog.records
    assert isinstance(error, GenerationFailed)
    assert error.message == "Checking the request failed: KeyError: 'lost'"
    assert record.getMessage() == "checking the request failed"
    assert record.exc_info is not None


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_contained(end: type[BaseException]) -> None:
    failed: list[EnginehouseError] = []
    with pytest.raises(end), Contained(failed.append, "checking the request failed"):
        raise end

    assert not failed


def test_one_guard_serves_many_blocks_also_inside_each_other() -> None:
    failed: list[EnginehouseError] = []
    guard = Contained(failed.append, "sampling failed")
    with guard:
        with guard:
            raise ValueError(1)
        raise ValueError(2)

    assert [error.message for error in failed] == ["Sampling failed: ValueError: 1", "Sampling failed: ValueError: 2"]
