"""HTTP on one connection: uvicorn's protocol with limits on size and time, and our error object for invalid HTTP.

Created by ``server`` for each connection; calls the guard. Does not know any routes. A client that sends its request
byte by byte would hold a connection indefinitely, so a head and a body each have a timeout. A client may send further
requests before the first one is answered. They are not parsed until then: received data is kept as bytes, and above a
limit the connection is not read.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Literal

import httptools
from attrs import evolve, frozen
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from enginehouse.api.http.access import AccessRecord, new_request_id
from enginehouse.api.http.config_snapshots import ConfigSnapshots
from enginehouse.api.http.errors import describe, http_error
from enginehouse.api.http.security import CONNECTION_KEY, error_at_once
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.settings.config import Settings

_HEADER_SIGNS = len(": \r\n")

_EMPTY_LINE = b"\r\n\r\n"
"""Ends every head, and every chunked body."""

_MAX_UNPARSED_BYTES = 64 * 1024
"""Bytes of pipelined requests above which reading pauses. The last read may exceed it."""

_LINGER_S = 1.0
"""Time for which a refused client may continue to send; the data is discarded."""

_COUNT_S = 1.0
"""Interval for counting the data that a client does not read."""

_NUM_FREE_BYTES = 16 * 1024
"""Bytes of every connection that are not counted: an ordinary request is never refused and needs no counting."""


@frozen(kw_only=True)
class WireBounds:
    """Limits on the size of a request's head and on the time of its parts."""

    max_head_bytes: int
    max_headers: int
    head_timeout_s: float
    body_timeout_s: float

    @classmethod
    def of(cls, settings: Settings) -> WireBounds:
        """Return the limits of the settings."""
        return cls(
            max_head_bytes=settings.limits.max_header_bytes,
            max_headers=settings.limits.max_headers,
            head_timeout_s=settings.server.head_timeout_s,
            body_timeout_s=settings.server.body_timeout_s,
        )


class _Reading(FlowControl):
    """uvicorn's flow control, which resumes with every response and every read of a body: here only if allowed."""

    is_held_back = False

    def hold_back(self) -> None:
        """Stop reading until :meth:`let_go`."""
        self.is_held_back = True
        self.pause_reading()

    def let_go(self) -> None:
        """Resume reading if it was held back."""
        if self.is_held_back:
            self.is_held_back = False
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resume reading unless it is held back."""
        if not self.is_held_back:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    The parser keeps an unfinished head in memory and copies it with every packet, so its size is checked as it arrives,
    not only when it is complete. The parser also consumes all the data it is given, so it is given one request at a
    time.

    Args:
        bounds: limits on sizes and times.
        arguments: uvicorn's.
    """

    flow: _Reading

    def __init__(self, *arguments: Any, bounds: WireBounds, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._unparsed = bytearray()
        self._last_parsed = b""  # up to three bytes of an empty line that the next packet may complete
        self._part: Literal["head", "body", "none"] = "head"  # part being read; "none" if the request is complete
        self._has_begun = False  # part of the head has arrived
        self._num_head_bytes = 0  # of a head, or of the trailer fields
        self._num_kept_of_head = 0  # of the request being answered
        self._num_body_left: int | None = None  # None for a chunked body
        self._body_parser: httptools.HttpRequestParser | None = None  # see _decline_upgrade
        self._offers_upgrade = False
        self._is_refused = False  # further data on this connection is ignored
        self._timer: asyncio.TimerHandle | None = None
        self._counting: asyncio.TimerHandle | None = None  # while the client does not read
        assert isinstance(self.app, ConfigSnapshots)
        self._memory = self.app.memory.open()

    # -- what uvicorn's loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first head."""
        super().connection_made(transport)
        self.flow = _Reading(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything held for the connection."""
        self._stop_timer()
        self._stop_counting()
        self._unparsed.clear()
        self._memory.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Buffer received data; it is parsed once the previous requests are answered."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed += data
        self._parse()

    def on_response_complete(self) -> None:
        """Continue with the next request, if it has arrived."""
        self.cycle.body = bytearray()  # unread rest of the body
        self._num_kept_of_head = 0
        super().on_response_complete()
        if self.transport.is_closing():
            self._unparsed.clear()
            self._close()
        self._parse()

    def pause_writing(self) -> None:
        """Start counting written data that the client does not read."""
        super().pause_writing()
        self._count_unread()

    def resume_writing(self) -> None:
        """Stop counting, as the client has read most of the data."""
        super().resume_writing()
        self._stop_counting()
        self._memory.go_on(self._num_kept_bytes)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, as no further request arrived."""
        self._close()

    # -- one request at a time ---------------------------------------------------------------------

    def _parse(self) -> None:
        """Parse the received data, up to the end of a request that is being answered."""
        while self._unparsed and not (self._is_refused or self._is_waiting):
            self._unset_keepalive_if_required()
            piece = bytes(self._unparsed[: self._piece_size()])
            del self._unparsed[: len(piece)]
            self._last_parsed = (self._last_parsed + piece[-3:])[-3:]
            self._parse_piece(piece)
        if self._is_refused:
            self._unparsed.clear()
        if len(self._unparsed) > _MAX_UNPARSED_BYTES:
            self.flow.hold_back()
        else:
            self.flow.let_go()  # a disconnect is only noticed while reading
        self._count()
        self._start_timer()

    def _count(self) -> None:
        """Count the memory held for this connection, and end the connection if that exceeds the limit."""
        try:
            self._memory.resize(self._num_kept_bytes)
        except EnginehouseError as error:
            self._unparsed.clear()
            self._refuse(describe(error))

    def _count_unread(self) -> None:
        """Count unread data: what is written, and what is queued after it, which may grow."""
        self._memory.stall(self._num_kept_bytes, self.transport.abort)
        self._counting = self.loop.call_later(_COUNT_S, self._count_unread)

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None

    @property
    def _num_kept_bytes(self) -> int:
        unread = len(self.cycle.body) if self.cycle is not None else 0
        unwritten, in_front = 0, self._memory.num_in_front
        if self.flow.write_paused:
            unwritten = self.transport.get_write_buffer_size() + (in_front() if in_front is not None else 0)
        num_bytes = len(self._unparsed) + self._num_head_bytes + self._num_kept_of_head + unread + unwritten
        return max(0, num_bytes - _NUM_FREE_BYTES)

    def _piece_size(self) -> int:
        """Return the number of bytes that can be parsed without passing the end of a request."""
        if self._part == "body" and self._num_body_left is not None:
            return self._num_body_left
        seam = self._last_parsed + self._unparsed[:3]
        end = seam.find(_EMPTY_LINE) - len(self._last_parsed)
        if _EMPTY_LINE not in seam:
            end = self._unparsed.find(_EMPTY_LINE)
            if end < 0:
                return len(self._unparsed)
        return end + len(_EMPTY_LINE)

    def _parse_piece(self, piece: bytes) -> None:
        num_before = self._num_head_bytes = self._num_head_bytes + len(piece)
        try:
            (self._body_parser or self.parser).feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._decline_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._num_head_bytes == num_before and not self._is_refused:
            self._check_head(num_before)

    def _decline_upgrade(self) -> None:
        """Continue with HTTP/1.1 after a head that offers another protocol, which may be ignored (RFC 9110, 7.8).

        The parser treats the following data as the other protocol, so a second parser, given the body's framing, reads
        it.
        """
        self._offers_upgrade = False
        callbacks = SimpleNamespace(
            on_body=self.on_body, on_chunk_header=self.on_chunk_header, on_message_complete=self.on_message_complete
        )
        self._body_parser = httptools.HttpRequestParser(callbacks)
        framing = [field for field in self.headers if field[0] in (b"content-length", b"transfer-encoding")]
        self._body_parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % field for field in framing))

    # -- what the parser calls ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Handle the first byte of a head."""
        self._stop_timer()
        self._part, self._has_begun = "head", True
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self._memory  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of the head; trailer fields after the last chunk are ignored."""
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the body, unless the head was too long."""
        self._stop_timer()
        fields = dict(self.headers)
        num_bytes = len(self.url) + sum(len(name) + len(value) + _HEADER_SIGNS for name, value in self.headers)
        self._check_head(num_bytes)
        if self.parser.get_method() == b"CONNECT" and not self._is_refused:
            self._refuse(http_error(400, "This server is not a proxy: it does not take CONNECT."))
        self._offers_upgrade = self.parser.should_upgrade()
        self._part, self._has_begun, self._num_head_bytes, self._num_kept_of_head = "body", False, 0, num_bytes
        self._num_body_left = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))
        if self._is_refused:
            return
        knows_chunks = self.parser.get_http_version() != "1.0"
        self.expect_100_continue = self.expect_100_continue and knows_chunks
        super().on_headers_complete()
        if not knows_chunks:
            _send_unchunked(self.cycle)

    def on_chunk_header(self) -> None:
        """Start a chunk; the last one is empty."""
        self._num_head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._num_head_bytes = 0
        if self._num_body_left is not None:
            self._num_body_left -= len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; another one may follow."""
        if self._offers_upgrade:
            return  # its body has not arrived yet
        self._body_parser = None
        self._stop_timer()
        self._part, self._num_head_bytes = "none", 0
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP and close the connection."""
        self._refuse(http_error(400, msg))

    # -- bounds ------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_waiting(self) -> bool:
        """True if a complete request is being answered, so that the next one waits."""
        return self._part == "none" and self._is_answering

    def _check_head(self, num_bytes: int) -> None:
        bounds = self._bounds
        if self._is_refused or self.transport.is_closing():
            return
        if num_bytes > bounds.max_head_bytes:
            message = f"The request's headers are longer than {bounds.max_head_bytes} bytes (limits.max_header_bytes)."
        elif self.headers is not None and len(self.headers) > bounds.max_headers:
            message = f"The request has more than {bounds.max_headers} headers (limits.max_headers)."
        else:
            return
        guard = self.app
        assert isinstance(guard, ConfigSnapshots)
        self._refuse(guard.check_long_head(dict(reversed(self.headers or []))) or http_error(431, message))

    def _start_timer(self) -> None:
        """Limit the time of the part being read; data between two requests starts a head."""
        if self._timer is not None or self.transport.is_closing() or self._is_waiting:
            return
        seconds = self._bounds.body_timeout_s if self._part == "body" else self._bounds.head_timeout_s
        self._timer = self.loop.call_later(seconds, self._end_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow(self) -> None:
        """Close a connection whose request does not arrive in time."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._part != "body" and self._is_answering):
            self._start_timer()  # reading is paused, or the client need not send more before its response is complete
        elif self._part == "body" and not self.cycle.response_started:
            seconds = self._bounds.body_timeout_s
            self._refuse(http_error(408, f"The body did not come within {seconds:g} s (server.body_timeout_s)."))
        elif self._has_begun and not self._is_answering:
            seconds = self._bounds.head_timeout_s
            self._refuse(http_error(408, f"The head did not come within {seconds:g} s (server.head_timeout_s)."))
        else:
            self._close()

    def _refuse(self, answer: ErrorAnswer) -> None:
        self._is_refused = True
        if self._is_answering and self.cycle.response_started:
            self._close()  # another response within this one would be read as part of it
            return
        is_known = self._is_answering or self._part == "body"  # to the application, which reports its end
        if self._is_answering:  # the application must not continue with what it has
            self.cycle.disconnected, self.cycle.body = True, bytearray()
            self.cycle.message_event.set()
        record = AccessRecord(method="-", path="-", status=answer.status, outcome=answer.code)
        record.request_id = new_request_id()
        status, headers, body = error_at_once(evolve(answer, request_id=record.request_id), self.scope or {})
        head = f"HTTP/1.1 {status} {_phrase(status)}\r\nx-request-id: {record.request_id}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers)
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._hang_up()
        if not is_known:
            app = self.app
            assert isinstance(app, ConfigSnapshots)
            app.end(record)

    def _hang_up(self) -> None:
        """Close, but read for a moment longer: a reset would discard the response at a client that is still sending."""
        self._stop_timer()
        if not self.transport.can_write_eof():  # TLS
            self._close()
            return
        self.transport.write_eof()
        self.flow.let_go()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self._close)

    def _close(self, num_unread_before: float = math.inf) -> None:
        """Close when the client has read the rest; it may take its time, provided that it makes progress."""
        self._stop_timer()
        self.transport.close()
        num_unread = self.transport.get_write_buffer_size()
        if num_unread >= num_unread_before:
            self.transport.abort()
        elif num_unread:
            self._timer = self.loop.call_later(self._bounds.body_timeout_s, self._close, num_unread)


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Let closing the connection end a body of unknown length, as HTTP/1.0 has no chunks."""
    send_framed, has_length = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = b"content-length" in {name.lower() for name, _ in message.get("headers", ())}
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)

    cycle.send = send  # type: ignore[method-assign]


def _phrase(status: int) -> str:
    """Return the reason phrase of a status; empty for one that Python does not know, such as 529."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
