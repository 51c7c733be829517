"""HTTP on one connection: uvicorn's protocol, bounded in size and time, with our error object for what is no HTTP.

Made by :mod:`enginehouse.api.server` for each connection; calls the guard. Knows no routes. A client that sends its
request byte by byte would hold a connection for ever, so a head and a body each have a time in which they must come.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Literal

from attrs import frozen
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from enginehouse.api.access import AccessRecord
from enginehouse.api.errors import ErrorAnswer, http_error
from enginehouse.api.generations import Generations
from enginehouse.api.request_ids import new_request_id
from enginehouse.config import Settings

__all__ = ["HttpProtocol", "WireBounds"]

_HEADER_SIGNS = len(": \r\n")


@frozen(kw_only=True)
class WireBounds:
    """How large a request's head may be, and how long its parts may take."""

    max_head_bytes: int
    max_headers: int
    head_timeout_s: float
    body_timeout_s: float

    @classmethod
    def of(cls, settings: Settings) -> WireBounds:
        """As the settings say."""
        return cls(
            max_head_bytes=settings.limits.max_header_bytes,
            max_headers=settings.limits.max_headers,
            head_timeout_s=settings.server.head_timeout_s,
            body_timeout_s=settings.server.body_timeout_s,
        )


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    The parser keeps an unfinished head in memory and copies it with every packet, so its size is looked at while it
    comes, not only when it is complete.

    Args:
        bounds: sizes and times.
        arguments: uvicorn's.
    """

    def __init__(self, *arguments: Any, bounds: WireBounds, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._part: Literal["head", "body", "none"] = "head"  # what is being read; none: the request is complete
        self._has_begun = False  # something of the head has come
        self._began_before = True  # this packet did: all of it belongs to the head
        self._num_head_bytes = 0
        self._is_refused = False  # what still comes on this connection is not looked at
        self._timer: asyncio.TimerHandle | None = None

    # -- what uvicorn's loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head may come."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what arrived; a head that does not end is refused."""
        if self._is_refused:
            return
        self._began_before = self._part != "body"
        super().data_received(data)
        if self._part == "head" and self._began_before:
            self._num_head_bytes += len(data)
            self._check_head(self._num_head_bytes)
        self._start_timer()

    # -- what the parser calls ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._stop_timer()
        self._part, self._has_begun = "head", True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The body begins, unless the head was too long."""
        self._stop_timer()
        self._check_head(len(self.url) + sum(len(name) + len(value) + _HEADER_SIGNS for name, value in self.headers))
        self._part, self._has_begun, self._num_head_bytes = "body", False, 0
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; another one may follow."""
        self._stop_timer()
        self._part, self._began_before = "none", False
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        self._refuse(http_error(400, msg))

    # -- bounds ------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_head(self, num_bytes: int) -> None:
        bounds = self._bounds
        if self.transport.is_closing():
            return
        if num_bytes > bounds.max_head_bytes:
            message = f"The request's headers are longer than {bounds.max_head_bytes} bytes (limits.max_header_bytes)."
        elif self.headers is not None and len(self.headers) > bounds.max_headers:
            message = f"The request has more than {bounds.max_headers} headers (limits.max_headers)."
        else:
            return
        guard = self.app
        assert isinstance(guard, Generations)
        self._refuse(guard.check_long_head(dict(reversed(self.headers or []))) or http_error(431, message))

    def _start_timer(self) -> None:
        """Limit the time of what is being read; whatever comes between two requests begins a head."""
        if self._timer is not None or self.transport.is_closing() or (self._part == "none" and self._is_answering):
            return
        seconds = self._bounds.body_timeout_s if self._part == "body" else self._bounds.head_timeout_s
        self._timer = self.loop.call_later(seconds, self._end_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow(self) -> None:
        """End a connection whose request does not come."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._part != "body" and self._is_answering):
            self._start_timer()  # we do not read, or the client need not send more before its answer is complete
        elif self._part == "body" and not self.cycle.response_started:
            seconds = self._bounds.body_timeout_s
            self._refuse(http_error(408, f"The body did not come within {seconds:g} s (server.body_timeout_s)."))
        elif self._has_begun and not self._is_answering:
            seconds = self._bounds.head_timeout_s
            self._refuse(http_error(408, f"The head did not come within {seconds:g} s (server.head_timeout_s)."))
        else:
            self.transport.close()

    def _refuse(self, answer: ErrorAnswer) -> None:
        self._is_refused = True
        body = answer.body()
        record = AccessRecord(method="-", path="-", status=answer.status, outcome=answer.code)
        record.request_id = new_request_id()
        head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: {record.request_id}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
        if self._part != "body":  # else the application knows the request and tells of its end
            app = self.app
            assert isinstance(app, Generations)
            app.end(record)
