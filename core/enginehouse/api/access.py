"""The access log: one structured line per request, with its outcome. Prompts and answers are never in it.

The guard creates a record per request and writes it when the response has ended; handlers fill it in.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from attrs import define, field

__all__ = ["RECORD_KEY", "AccessRecord"]

RECORD_KEY = "enginehouse.access"
"""Where the record of a request lies in its ASGI scope."""

_log = logging.getLogger("enginehouse.access")

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/,+@")


@define(kw_only=True)
class AccessRecord:
    """What is known about one request; None is "does not apply".

    Attributes:
        key: name of the API key that was used.
        outcome: finish reasons (``stop``, ``length``), ``cancelled`` when the client left, ``ok``, or an error code.
        status: of the HTTP response; 0 when none was sent.
        queue_s: times are in seconds; those of the engine are measured in the worker.
    """

    method: str
    path: str
    status: int = 0
    outcome: str = "ok"
    request_id: str | None = None
    key: str | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    first_token_s: float | None = None
    began: float = field(factory=time.perf_counter)

    def mark_first_token(self) -> None:
        """Note that the first text leaves now."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.began

    def write(self) -> None:
        """Write the line: ``key=value`` pairs, those that do not apply left out."""
        level = logging.DEBUG if self.path == "/health" else logging.INFO  # probes come every few seconds
        if not _log.isEnabledFor(level):
            return
        fields = {
            "id": self.request_id,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "model": self.model,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "first_token_s": self.first_token_s,
            "total_s": time.perf_counter() - self.began,
        }
        known = {name: value for name, value in fields.items() if value is not None}
        line = " ".join(f"{name}={_shown(value)}" for name, value in known.items())
        _log.log(level, "%s", line, extra={"access": known})


def _shown(value: Any) -> str:
    """The value so that a line stays one line and splits at spaces."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)[:200]
    if text and _PLAIN.issuperset(text):
        return text
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()
