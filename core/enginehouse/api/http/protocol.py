"""HTTP on one connection: uvicorn's protocol, bounded in size and time, with our error object for what is not HTTP.

Made by ``server`` for each connection; calls the guard. Knows no routes. A client that sends its
request byte by byte would hold a connection for ever, so a head and a body each have a time in which they must come.
A client may send further requests before the first one is answered. They are not parsed until then: what has arrived of
them is kept as bytes, and beyond some of these the connection is not read.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Literal

import httptools
from attrs import frozen
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.callers import CALLER_KEY, caller_of
from enginehouse.api.http.config_snapshots import Generations
from enginehouse.api.http.errors import ErrorAnswer, describe, http_error
from enginehouse.api.http.headers import new_request_id
from enginehouse.api.http.security import CONNECTION_KEY
from enginehouse.contract.errors import EnginehouseError
from enginehouse.settings.config import Settings
from enginehouse.settings.profiles import DEFAULT_PROFILE

__all__ = ["HttpProtocol", "WireBounds"]

_HEADER_SIGNS = len(": \r\n")

_EMPTY_LINE = b"\r\n\r\n"
"""Ends every head, and every body in chunks."""

_MAX_UNPARSED_BYTES = 64 * 1024
"""Of requests that wait for the answer before theirs; with more, reading pauses. The last read may exceed it."""

_LINGER_S = 1.0
"""For how long a client that was refused may go on sending; nothing of it is kept."""

_COUNT_S = 1.0
"""Between two looks at what a client does not read."""

_NUM_FREE_BYTES = 16 * 1024
"""Of every connection that are not counted: what an ordinary request needs is never refused, and costs no counting."""


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


class _Reading(FlowControl):
    """uvicorn's flow control, which it resumes with every answer and every read of a body: here only where allowed."""

    is_held_back = False

    def hold_back(self) -> None:
        """Do not read until :meth:`let_go`."""
        self.is_held_back = True
        self.pause_reading()

    def let_go(self) -> None:
        """Read on if reading was held back."""
        if self.is_held_back:
            self.is_held_back = False
            self.resume_reading()

    def resume_reading(self) -> None:
        """Read on unless it is held back."""
        if not self.is_held_back:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    The parser keeps an unfinished head in memory and copies it with every packet, so its size is looked at while it
    comes, not only when it is complete. It also parses all that it is given, so it is given one request at a time.

    Args:
        bounds: sizes and times.
        arguments: uvicorn's.
    """

    flow: _Reading

    def __init__(self, *arguments: Any, bounds: WireBounds, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._unparsed = bytearray()
        self._last_parsed = b""  # three bytes at most, of an empty line that the next packet may complete
        self._part: Literal["head", "body", "none"] = "head"  # what is being read; none: the request is complete
        self._has_begun = False  # something of the head has come
        self._num_head_bytes = 0  # of a head, or of the fields after the last chunk
        self._num_kept_of_head = 0  # of the request that is being answered
        self._num_body_left: int | None = None  # None: the body comes in chunks
        self._body_parser: httptools.HttpRequestParser | None = None  # see _decline_upgrade
        self._offers_upgrade = False
        self._is_refused = False  # what still comes on this connection is not looked at
        self._timer: asyncio.TimerHandle | None = None
        self._counting: asyncio.TimerHandle | None = None  # while the client does not read
        assert isinstance(self.app, Generations)
        self._memory = self.app.memory.open()

    # -- what uvicorn's loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head may come."""
        super().connection_made(transport)
        self.flow = _Reading(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._stop_timer()
        self._stop_counting()
        self._unparsed.clear()
        self._memory.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what arrived; it is parsed once the requests before it are answered."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._unparsed += data
        self._parse()

    def on_response_complete(self) -> None:
        """The next request, if it has arrived, may begin."""
        self.cycle.body = bytearray()  # what nobody has read of it
        self._num_kept_of_head = 0
        super().on_response_complete()
        if self.transport.is_closing():
            self._unparsed.clear()
            self._close()
        self._parse()

    def pause_writing(self) -> None:
        """The client does not read what was written."""
        super().pause_writing()
        self._count_unread()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._stop_counting()
        self._memory.go_on(self._num_kept_bytes)

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        self._close()

    # -- one request at a time ---------------------------------------------------------------------

    def _parse(self) -> None:
        """Parse what has arrived, up to the end of a request that is being answered."""
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
            self.flow.let_go()  # a client that leaves is only noticed while we read
        self._count()
        self._start_timer()

    def _count(self) -> None:
        """Count what this connection makes the server keep, and end it where that is too much."""
        try:
            self._memory.resize(self._num_kept_bytes)
        except EnginehouseError as error:
            self._unparsed.clear()
            self._refuse(describe(error))

    def _count_unread(self) -> None:
        """Count what the client does not read: what is written, and what waits behind it, which may become more."""
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
        """Length of what may be parsed without going beyond the end of a request."""
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
        """Go on with HTTP/1.1 after a head that offers another protocol, which may be ignored (RFC 9110, section 7.8).

        The parser takes what follows for the other protocol, so another parser, told how the body is framed, reads it.
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
        """The first byte of a head."""
        self._stop_timer()
        self._part, self._has_begun = "head", True
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self._memory  # type: ignore[literal-required]

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; those after the last chunk of a body are passed over."""
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The body begins, unless the head was too long."""
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
        """A chunk begins; the last one has nothing in it."""
        self._num_head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_head_bytes = 0
        if self._num_body_left is not None:
            self._num_body_left -= len(body)
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; another one may follow."""
        if self._offers_upgrade:
            return  # its body is yet to come
        self._body_parser = None
        self._stop_timer()
        self._part, self._num_head_bytes = "none", 0
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        self._refuse(http_error(400, msg))

    # -- bounds ------------------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_waiting(self) -> bool:
        """Whether a complete request is being answered, so that the next one waits."""
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
        assert isinstance(guard, Generations)
        self._refuse(guard.check_long_head(dict(reversed(self.headers or []))) or http_error(431, message))

    def _start_timer(self) -> None:
        """Limit the time of what is being read; whatever comes between two requests begins a head."""
        if self._timer is not None or self.transport.is_closing() or self._is_waiting:
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
            self._close()

    def _refuse(self, answer: ErrorAnswer) -> None:
        self._is_refused = True
        if self._is_answering and self.cycle.response_started:
            self._close()  # another answer in the midst of this one would be read as a part of it
            return
        is_known = self._is_answering or self._part == "body"  # to the application, which tells of its end
        if self._is_answering:  # the application is not to go on with what it has
            self.cycle.disconnected, self.cycle.body = True, bytearray()
            self.cycle.message_event.set()
        scope: Any = self.scope or {}
        body = answer.body(caller_of(scope).profile if CALLER_KEY in scope else DEFAULT_PROFILE)
        record = AccessRecord(method="-", path="-", status=answer.status, outcome=answer.code)
        record.request_id = new_request_id()
        head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: {record.request_id}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._hang_up()
        if not is_known:
            app = self.app
            assert isinstance(app, Generations)
            app.end(record)

    def _hang_up(self) -> None:
        """Close, but read on for a moment: a reset would take the answer from a client that still sends."""
        self._stop_timer()
        if not self.transport.can_write_eof():  # TLS
            self._close()
            return
        self.transport.write_eof()
        self.flow.let_go()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self._close)

    def _close(self, num_unread_before: float = math.inf) -> None:
        """Close when the client has read the rest, for which it has time while it gets on with it."""
        self._stop_timer()
        self.transport.close()
        num_unread = self.transport.get_write_buffer_size()
        if num_unread >= num_unread_before:
            self.transport.abort()
        elif num_unread:
            self._timer = self.loop.call_later(self._bounds.body_timeout_s, self._close, num_unread)


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end the body where its length is unknown: HTTP/1.0 has no chunks."""
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
