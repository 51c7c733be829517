"""Finds the model of a server and runs checks against it, each within its time."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from attrs import evolve

from enginehouse.addresses import full_url
from enginehouse.conform.check import Check, CheckFailed, NotOffered, Outcome, Result
from enginehouse.conform.target import OutOfTime, Target
from enginehouse.errors import ConfigError

__all__ = ["connect", "run_checks"]

_CONNECT_TIMEOUT_S = 30.0


def connect(url: str, model: str | None = None, key: str | None = None, origin: str | None = None) -> Target:
    """Ask a server for its models.

    Args:
        url: the server; ``/v1`` is added where no path is given.
        model: the model to ask; None is the first one that is listed.

    Raises:
        ConfigError: there is no such server or no such model.
    """
    whole = full_url(url)
    if whole is None:
        raise ConfigError(f"{url!r} is no address; write http://host:port/v1, or unix:path for a Unix domain socket")
    url = whole if urlsplit(whole).path else f"{whole}/v1"
    target = Target(url, "", key, origin=origin)
    try:
        answer = target.with_deadline(_CONNECT_TIMEOUT_S).get("/models")
    except (OSError, OutOfTime, http.client.HTTPException) as error:
        raise ConfigError(f"{url} cannot be reached: {error}") from error
    data = answer.json()
    entries = data.get("data") if isinstance(data, dict) else None
    listed = [entry for entry in entries or () if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if answer.status != 200 or not listed:
        raise ConfigError(f"{url}/models lists no models: {answer.shown()}")
    entry = next((entry for entry in listed if model in (None, entry["id"])), None)
    if entry is None:
        raise ConfigError(f"{url} serves no model {model!r}; it serves {', '.join(entry['id'] for entry in listed)}")
    return evolve(target, model=entry["id"], entry=entry)


def run_checks(
    target: Target, checks: Sequence[Check], timeout_s: float, on_start: Callable[[Check], None] = lambda _: None
) -> Iterator[Result]:
    """Run the checks one after the other.

    Args:
        timeout_s: most seconds of one check.
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
        # Answers are read as the API describes them; what is missing there is a fault of the server.
        return "failed", f"the answer has an unexpected form: {type(error).__name__}: {error}"
    return "passed", ""
