"""Requests and streams that tests of several parts of the API share."""

from __future__ import annotations

from typing import Any

import httpx


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a short chat."""
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


def begin(response: httpx.Response) -> None:
    """Read the first line of a stream; the rest comes while the response is open."""
    lines = response.extensions["lines"] = response.iter_lines()
    next(lines)
