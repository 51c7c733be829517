"""Events of requests for the stream ``/admin/events``: when one begins to be answered, and when its response has ended.

They contain no prompts and no answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from attrs import evolve, field, frozen

from enginehouse.api.http.access import AccessRecord
from enginehouse.serving.lifecycle import Events, Subscription

_MAX_CHARS = 200


@frozen(kw_only=True)
class RequestEvent:
    """An event of a request that generates or computes something. None is "does not apply", or "not known yet".

    Attributes:
        kind: ``request_began`` once it is admitted, or when it is refused; then ``request_ended``.
        id: the id in the response body, by which ``/admin/requests`` lists it; ``request_id`` is that of the header.
        key: name of the API key.
        model: the configured name of the model that answers; ``asked_model`` is the name in the request.
        status: of the HTTP response; 0 if none was sent. This and the following are for ``request_ended``.
        outcome: finish reasons, ``cancelled`` if the client disconnected, ``ok``, or an error code.
        usage: counts and times of generation by their names in the log.
        at: Unix time in seconds.
    """

    kind: Literal["request_began", "request_ended"]
    id: str | None
    request_id: str | None
    key: str | None
    endpoint: str | None
    model: str | None
    asked_model: str | None
    stream: bool | None
    status: int | None = None
    outcome: str | None = None
    finish_reasons: Sequence[str] = ()
    first_token_s: float | None = None
    total_s: float | None = None
    usage: Mapping[str, float] = field(factory=dict)
    at: float = field(factory=time.time)


class RequestEvents(Events[RequestEvent]):
    """Passes the events of requests to every listener, so that each ``request_ended`` follows a ``request_began``."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str | None, AccessRecord] = {}

    def begin(self, record: AccessRecord) -> None:
        """Tell that a request was admitted."""
        self._running[record.answer_id] = record
        if self:
            self.publish(_began(record))

    def end(self, record: AccessRecord) -> None:
        """Tell that a response has ended, also of a request that was refused before it began."""
        has_begun = self._running.pop(record.answer_id, None) is not None
        if self and record.answer_id is not None:
            if not has_begun:
                self.publish(_began(record))
            self.publish(_ended(record))

    @contextmanager
    def subscribe(self, subscription: Subscription[Any] | None = None) -> Iterator[Subscription[RequestEvent]]:
        """Receive events within the block; first those of the requests that have already started."""
        with super().subscribe(subscription) as subscribed:
            for record in self._running.values():
                subscribed.push(_began(record))
            yield subscribed


def _began(record: AccessRecord) -> RequestEvent:
    """Return the event for a request that was admitted."""
    return RequestEvent(
        kind="request_began",
        id=record.answer_id,
        request_id=record.request_id,
        key=record.key,
        endpoint=record.endpoint,
        model=record.model,
        asked_model=_encodable(record.asked_model),
        stream=record.stream,
    )


def _ended(record: AccessRecord) -> RequestEvent:
    """Return the event for a request whose response has ended."""
    return evolve(
        _began(record),
        kind="request_ended",
        status=record.status,
        outcome=record.outcome,
        finish_reasons=tuple(record.finish_reasons),
        first_token_s=record.pace.first_s,
        total_s=record.total_s,
        usage=record.counts(),
        at=time.time(),
    )


def _encodable(text: str | None) -> str | None:
    """Shorten a client's text, and replace what JSON in UTF-8 cannot hold."""
    return text if text is None else text[:_MAX_CHARS].encode("utf-8", "replace").decode()
