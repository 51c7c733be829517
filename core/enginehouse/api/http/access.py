"""Access record of one request, its log line and the timing of its text; its id and rates in response headers."""

from __future__ import annotations

import json
import logging
import math
import re
import time
import uuid
from array import array
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from attrs import define, field
from litestar.types import Scope

from enginehouse.api.http.admission import RateState, Ticket
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.usage import Usage
from enginehouse.pipeline.parameters import Parameters

REQUEST_ID_HEADER = b"x-request-id"

_WORD = re.compile(rb"[A-Za-z0-9._~:+=@-]{1,128}")


def new_request_id() -> str:
    """Return a new id, for a request whose client sent none and whose response body has no id."""
    return f"req-{uuid.uuid4().hex}"


def sent_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the id that the client sent, or None.

    Raises:
        InvalidRequest: it is not a word of 1 to 128 letters, digits and ``._~:+=@-``, or there are several.
    """
    values = [value for name, value in headers if name == REQUEST_ID_HEADER]
    if not values:
        return None
    if len(values) > 1 or not _WORD.fullmatch(values[0]):
        message = "X-Request-Id: must be one word of 1 to 128 letters, digits and ._~:+=@-"
        raise InvalidRequest(message, "X-Request-Id")
    return values[0].decode("ascii")


RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""All rate-limit headers that a response may have."""


def rate_headers(ticket: Ticket) -> list[tuple[bytes, bytes]]:
    """Return the rate-limit headers of a response; empty if no rate applies."""
    return [(name.encode(), value.encode()) for state in ticket.states for name, value in _fields_of(state)]


def _fields_of(state: RateState) -> list[tuple[str, str]]:
    unit = state.rate.unit
    return [
        (f"x-ratelimit-limit-{unit}", str(state.rate.per_minute)),
        (f"x-ratelimit-remaining-{unit}", str(state.remaining)),
        (f"x-ratelimit-reset-{unit}", _span(state.reset_s)),
    ]


def _span(seconds: float) -> str:
    """Format a duration as OpenAI does: ``6m0s``, ``2s``, ``20ms``."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds; one more bucket holds longer gaps."""


class TokenLatency:
    """Timing of one request's text.

    Args:
        began: ``time.perf_counter()`` of its arrival.
    """

    __slots__ = ("_began", "_marks")

    def __init__(self, began: float) -> None:
        self._began = began
        self._marks = array("d")

    def mark(self) -> None:
        """Record that text was sent, or buffered for a whole response, just now."""
        self._marks.append(perf_counter())

    @property
    def first_s(self) -> float | None:
        """Seconds from the request's arrival to its first text; None before it."""
        return self._marks[0] - self._began if self._marks else None

    def gaps(self) -> tuple[list[int], float]:
        """Return the number of gaps in each bucket, and their sum in seconds."""
        if len(self._marks) < 2:
            return [0] * (len(GAP_BUCKETS_S) + 1), 0.0
        gaps_s = np.diff(np.frombuffer(self._marks))
        buckets = np.searchsorted(GAP_BUCKETS_S, gaps_s)
        counts: list[int] = np.bincount(buckets, minlength=len(GAP_BUCKETS_S) + 1).tolist()
        return counts, float(gaps_s.sum())


RECORD_KEY = "enginehouse.access"
"""Key of a request's record in its ASGI scope."""

_log = logging.getLogger("enginehouse.access")

_MAX_CHARS = 200  # limit for text written by clients

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/,+@")


@define(kw_only=True)
class AccessRecord:
    """Data known about one request; None means "not applicable".

    Attributes:
        endpoint: the route's path without its prefix, such as ``/chat/completions``; None without a route.
        status: HTTP status of the response; 0 if none was sent.
        outcome: finish reasons (``stop``, ``length``), ``cancelled`` (client disconnected), ``ok``, or an error code.
        request_id: as in the response header.
        answer_id: the id in the response body, by which the engine knows the request.
        key: name of the API key that was used.
        num_texts: texts or pairs of texts of a pooling request.
        model: the configured name of the model that answered; ``asked_model`` is the name in the request.
        adapters: names of its adapters (LoRA) that the request used.
        usage: what it has cost; None if nothing was generated for it.
        is_complete: False if the response was broken off: then ``usage`` covers the part until then.
        metrics: further counts that optimisations report for this request, by name and by the object that did the
            work (such as the compressor).
        parameters: effective parameters of the first prompt.
        traceparent: the W3C Trace Context header of that name, not validated; likewise ``tracestate``.
        began: ``time.perf_counter`` at its arrival; ``began_ns`` is the same moment as Unix time in nanoseconds.
    """

    method: str
    path: str
    endpoint: str | None = None
    status: int = 0
    outcome: str = "ok"
    request_id: str | None = None
    answer_id: str | None = None
    key: str | None = None
    model: str | None = None
    adapters: Sequence[str] = ()
    asked_model: str | None = None
    stream: bool | None = None
    num_choices: int | None = None
    num_texts: int | None = None
    usage: Usage | None = None
    is_complete: bool = False
    total_s: float = 0.0
    finish_reasons: Sequence[str] = ()
    metrics: dict[tuple[str, str], float] = field(factory=dict)
    parameters: Parameters | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    began: float = field(factory=time.perf_counter)
    began_ns: int = field(factory=time.time_ns)
    pace: TokenLatency = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pace = TokenLatency(self.began)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens after the first of each choice, per second of decoding; None if there are none."""
        if self.usage is None or not self.is_complete or not self.usage.decode_s:
            return None
        num_decoded = self.usage.completion_tokens - (self.num_choices or 1)
        return num_decoded / self.usage.decode_s if num_decoded > 0 else None

    def counts(self) -> dict[str, float]:
        """Return the counts and times of generation that apply, by name."""
        usage = () if self.usage is None else self.usage.shown(is_complete=self.is_complete)
        counts = {name: value for name, _, value in usage}
        for (name, _), value in self.metrics.items():
            counts[name] = counts.get(name, 0) + value
        return counts

    def identify(self) -> str:
        """Return the request's id, creating one if the client sent none."""
        self.request_id = self.request_id or new_request_id()
        return self.request_id

    def end(self) -> None:
        """Write the log line, at the end of the response."""
        self.total_s = time.perf_counter() - self.began
        level = logging.DEBUG if self.path == "/health" else logging.INFO  # health probes arrive every few seconds
        if _log.isEnabledFor(level):
            fields = self.fields()
            line = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
            _log.log(level, "%s", line, extra={"access": fields})

    def fields(self) -> dict[str, Any]:
        """Return the applicable log fields by name."""
        fields = {
            "id": self.request_id,
            "answer_id": self.answer_id if self.answer_id != self.request_id else None,
            "key": self.key,
            "method": self.method,
            "path": self.path[:_MAX_CHARS],
            "status": self.status,
            "outcome": self.outcome,
            "model": self.model,
            "asked_model": self._other_model(),
            "adapters": ",".join(self.adapters) or None,
            "stream": self.stream,
            "texts": self.num_texts,
            **self.counts(),
            "first_token_s": self.pace.first_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _other_model(self) -> str | None:
        """Return the requested name if it differs from the model's configured name."""
        asked = self.asked_model
        return asked[:_MAX_CHARS] if asked is not None and asked != self.model else None


def record_of(scope: Scope) -> AccessRecord:
    """Return the access record of a request that the guard admitted."""
    record: AccessRecord = scope[RECORD_KEY]  # type: ignore[literal-required]
    return record


def _shown(value: Any) -> str:
    """Format a value so that the log line stays one line and splits at spaces."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)[:_MAX_CHARS]
    if text and _PLAIN.issuperset(text):
        return text
    # Escape line ends that are not special in JSON, and terminal control characters.
    return json.dumps(text, ensure_ascii=not text.isprintable())
