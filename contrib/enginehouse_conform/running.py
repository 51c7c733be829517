"""Runs checks against a server, each with a timeout."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Sequence

from enginehouse.cli.target import OutOfTime, Target
from enginehouse_conform.check import Check, CheckFailed, NotOffered, Outcome, Result

__all__ = ["run_checks"]


def run_checks(
    target: Target, checks: Sequence[Check], timeout_s: float, on_start: Callable[[Check], None] = lambda _: None
) -> Iterator[Result]:
    """Run the checks sequentially.

    Args:
        timeout_s: maximum seconds per check.
        on_start: called before each check.
    """
    for check in checks:
        on_start(check)
        began = time.monotonic()
        outcome, detail = _run(check, target.with_deadline(timeout_s), timeout_s)
        yield Result(check.behaviour, check.sentence, outcome, detail, round(time.monotonic() - began, 2))


def _run(check: Check, target: Target, timeout_s: float) -> tuple[Outcome, str]:
    try:
        check.run(target)
    except CheckFailed as error:
        return "failed", str(error)
    except NotOffered as error:
        return error.outcome, str(error)
    except OutOfTime:
        return "failed", f"not done after {timeout_s:g} s"
    except (OSError, http.client.HTTPException) as error:
        return "failed", f"the connection broke: {type(error).__name__}: {error}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        # Checks read answers as the API describes them; missing data is a fault of the server.
        return "failed", f"the answer has an unexpected form: {type(error).__name__}: {error}"
    return "passed", ""
