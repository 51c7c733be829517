"""The contract of surfaces, the APIs that clients speak: routes, request bodies, responses, frames and error bodies.

Implemented by plugin authors, and by core for OpenAI's API. Core serves the routes of a surface: it checks keys, scopes
and limits, decodes bodies strictly, queues, cancels when the client disconnects, counts and logs. A surface translates:
a body to :class:`.GenerateRequest` values, and pieces of output to chunks. It knows no
sockets, keys or engines; what it may ask of core is in :mod:`enginehouse.contract.calls`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from attrs import field, frozen

from enginehouse.contract.identity import Scope
from enginehouse.contract.types import GenerateRequest, PromptProgress, TokenLogprob
from enginehouse.contract.usage import Usage

__all__ = [
    "NDJSON",
    "SSE",
    "Answer",
    "Assembler",
    "CallPiece",
    "Chunk",
    "DetachedAssembler",
    "ErrorAnswer",
    "Frame",
    "GenerationRoute",
    "Limit",
    "Piece",
    "Reply",
    "ReplyRoute",
    "Route",
    "Surface",
    "new_id",
]

Chunk = dict[str, Any]
"""A JSON object of a stream, or a whole response; encoded by core when it is written."""


class CallPiece(msgspec.Struct, gc=False):
    """Addition to one tool call; ``id`` and ``name`` come first, and once."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Limit = Literal["max_tokens", "context"]
"""Cause of the end of a choice with the finish reason ``length``: the request's own limit, or the model's context."""


class Piece(msgspec.Struct, gc=False):
    """Addition to one choice: text with its log-probabilities, reasoning, part of a call, or the end.

    Attributes:
        index: number of the choice, from 0; counts over all choices of a call with several requests.
        text: whole characters of the answer; empty in pieces about something else.
        logprobs: those of ``text``, if the request asks for them.
        finish_reason: an engine's, or ``tool_calls``; set in the last piece of a choice only.
        reasoning: text of the reasoning, which comes before the answer.
        call: part of a tool call.
        scores: members that describe the prompt; they come before everything else.
        stop_reason: at the end, the stop string or end token id that ended the choice, if one did.
        limit: at the end, what ended a choice whose finish reason is ``length``.
        progress: of the prefill, for requests with ``return_progress``; comes before everything else.
        token_ids: the tokens since the choice's last piece, if the engine reports ids; at the end the remaining ones,
            of requests with ``return_token_ids`` also those without text (stop text, end token).
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    call: CallPiece | None = None
    scores: dict[str, Any] | None = None
    stop_reason: str | int | None = None
    limit: Limit | None = None
    progress: PromptProgress | None = None
    token_ids: tuple[int, ...] = ()


@frozen
class ErrorAnswer:
    """An error ready to send: as a response before the first byte, as a chunk after it.

    Attributes:
        status: the HTTP status that fits, also if another one was sent already.
        kind: class of errors, such as ``invalid_request_error`` or ``rate_limit_error``.
        code: name of the error, such as ``model_not_found``; docs/troubleshooting.md lists them.
        param: path of the request field that is wrong, if any.
        headers: response headers, such as ``retry-after``.
        request_id: of the response header ``X-Request-Id``.
    """

    status: int
    message: str
    kind: str
    code: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    request_id: str = "-"


@frozen(kw_only=True)
class Frame:
    """The format in which the chunks of a stream are written.

    Attributes:
        media_type: of the response.
        before: bytes before each chunk, and ``after`` it.
        last: bytes at the end of a complete stream; clients take a stream without them for a truncated one.
        last_failed: bytes at the end of a stream whose last chunk reports an error.
        ping: bytes that keep the connection open while nothing is generated, in the queue and during prefill too;
            clients ignore them.
        event: member of a chunk whose text names its event, in a line ``event:`` before it; None: events have no names.
            Found fastest if it is the chunk's first one.
    """

    media_type: str
    before: bytes = b""
    after: bytes = b"\n"
    last: bytes = b""
    last_failed: bytes = b""
    ping: bytes = b"\n"
    event: str | None = None


SSE = Frame(
    media_type="text/event-stream; charset=utf-8",
    before=b"data: ",
    after=b"\n\n",
    last=b"data: [DONE]\n\n",
    ping=b": ping\n\n",
)
"""Server-sent events without names, ended as OpenAI ends them."""

NDJSON = Frame(media_type="application/x-ndjson", ping=b" ")
"""One JSON object per line. A ping is a space before the next object: clients of Ollama fail on empty lines."""


@frozen
class Reply:
    """A response that is not generated, and the body of an error.

    Attributes:
        body: a JSON object or a list of them, encoded by core, or bytes of ``media_type``; None is an empty body.
        status: HTTP status; None is 200, and for an error the one that core has chosen.
        headers: further headers.
        stream: the chunks of a stream, or the bytes of their JSON, instead of a body. It is closed when the client
            disconnects; an exception in it becomes a last chunk with the surface's error body.
        frame: format of the stream.
    """

    body: Chunk | list[Chunk] | bytes | None = None
    status: int | None = field(default=None, kw_only=True)
    headers: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    media_type: str = field(default="application/json", kw_only=True)
    stream: AsyncIterator[Chunk | bytes] | None = field(default=None, kw_only=True)
    frame: Frame = field(default=SSE, kw_only=True)


class Answer(Protocol):
    """The response to requests that their model has accepted. Provided by core."""

    @property
    def id(self) -> str:
        """Id of the first request."""
        ...

    @property
    def request_id(self) -> str:
        """Id in the response header ``X-Request-Id``, which the client may have chosen."""
        ...

    @property
    def model(self) -> str:
        """Name of the model for the client."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        ...

    @property
    def is_streamed(self) -> bool:
        """True if the chunks of the assembler are sent, False if its whole response is."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The sampling and stopping parameters in force, and the fields of samplers that the requests set, by name."""
        ...

    def usage(self) -> Usage:
        """Return the tokens and times of all prompts and choices so far.

        Before the end, ``cached_tokens`` and other counts that only the engine knows are 0, the time in the queue is
        part of ``prefill_s``, and times are measured in the server.
        """
        ...


class Assembler(Protocol):
    """The state machine that writes one response; created per request; one call at a time, in any thread.

    It receives every piece of output in order, whether the response is streamed or not, so that a stream and a whole
    response are made of the same items.

    Calls:
        opening: once per stream; server, thread of the plugin; microseconds.
        push: for each piece of output; server, thread of the plugin; microseconds.
        close: at the end of a stream; server, thread of the plugin; microseconds.
        fail: at the end of a stream that breaks off; server, thread of the plugin; microseconds.
        whole: once per response that is not streamed; server, thread of the plugin; milliseconds.
    """

    def opening(self) -> Iterable[Chunk]:
        """Return the chunks of a stream before the first piece."""
        ...

    def push(self, piece: Piece) -> Iterable[Chunk | bytes]:
        """Add a piece; returns the chunks that can be sent now, which are ignored if the response is not streamed.

        This runs for every token; a chunk may be the bytes of a JSON object.
        """
        ...

    def close(self, usage: Usage, details: dict[str, Any] | None) -> Iterable[Chunk]:
        """Return the last chunks of a stream that is complete.

        Args:
            usage: the tokens and times of the whole answer.
            details: value of the extension member ``enginehouse``, if the client asked for it.
        """
        ...

    def fail(self, error: ErrorAnswer) -> Iterable[Chunk]:
        """Return the last chunks of a stream that breaks off; they report the error."""
        ...

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk | list[Chunk]:
        """Return the response that is not streamed, once every piece was pushed; may run in a thread."""
        ...


class DetachedAssembler(Assembler, Protocol):
    """The writer of a detached response.

    Calls:
        early: once per detached response that is not streamed; server, thread of the plugin; microseconds.
    """

    def early(self) -> Chunk:
        """Return the response to a client that does not stream: sent first, while no client reads the stream."""
        ...


@frozen(kw_only=True)
class Route:
    """An address of a surface.

    Attributes:
        method: a HEAD request without a route of its own is answered by the GET route, without the body.
        path: such as ``/v1/messages``; ``{name:str}`` and ``{name:path}`` are parameters.
        name: identifies the operation in the OpenAPI document, like ``summary`` and the schemas.
        header: only requests with this header, in lower case, reach the route. Another surface may have the same
            method and path for the others, with the same ``scope`` and ``limits``.
        body: attrs class of the request body, decoded strictly: values are never coerced, and unknown members are
            listed in the header ``X-Enginehouse-Ignored``. None: a request body is not read.
        scope: permission that the caller's key needs.
        limits: limits of the caller that count a request: ``all``, ``concurrency`` or none.
        request_schema: JSON Schema of the body; None derives it from ``body``.
        response_schema: JSON Schema of the response.
    """

    method: Literal["GET", "POST", "DELETE", "HEAD"] = "POST"
    path: str
    name: str
    summary: str
    header: str | None = None
    body: type[Any] | None = None
    scope: Scope = "infer"
    limits: Literal["all", "concurrency"] | None = "concurrency"
    request_schema: Mapping[str, Any] | None = None
    response_schema: Mapping[str, Any] = field(factory=lambda: {"type": "object"})


@frozen(kw_only=True)
class GenerationRoute(Route):
    """An address whose requests generate. All limits count them.

    Attributes:
        body: has an attribute ``stream``: True if the response is streamed.
        requests: returns one request per prompt, all for the same model. Core sets the caller's permissions, profile
            and namespace; a ``namespace`` set here is kept within the caller's. Raises RequestError if the body is
            invalid. A function is called in a thread of the plugin, a coroutine function on an event loop of it. It
            may return a :class:`Reply` instead, where the body asks for something that is not generated.
        assemble: returns the writer of the response, once every prompt is accepted; on an event loop of the plugin,
            cancelled if the client leaves.
            For a detached response it is a :class:`DetachedAssembler`.
        detached: whether the response to a call goes on when its client disconnects, as one that can be taken up again
            does; limits, timeouts and the log count it until its end. It is written as a stream, and its assembler
            hears of the end: ``close`` or ``fail``. None: no response is detached.
        frame: format of streams.
        chunk_schema: JSON Schema of the chunks of a stream.
    """

    body: type[Any]
    requests: Callable[[Any], Sequence[GenerateRequest] | Awaitable[Sequence[GenerateRequest] | Reply]]
    assemble: Callable[[Any, Any], Awaitable[Assembler]]
    detached: Callable[[Any], bool] | None = None
    limits: Literal["all"] = "all"
    frame: Frame = SSE
    chunk_schema: Mapping[str, Any] = field(factory=lambda: {"type": "object"})


@frozen(kw_only=True)
class ReplyRoute(Route):
    """An address that is answered with a :class:`Reply`, without generating.

    Attributes:
        handle: returns the response; called on an event loop of the plugin. It may raise errors of
            :mod:`enginehouse.contract.errors`.
    """

    handle: Callable[[Any], Awaitable[Reply]]


class Surface(Protocol):
    """An API that clients speak; ``name`` is listed in the setting ``server.surfaces``.

    ``requests`` and ``handle`` of a route get a :class:`~enginehouse.contract.calls.Call`, ``assemble`` a call and an
    :class:`Answer`. An address, and every one below it, belongs to the surface: its errors have the surface's body
    there, including those that core raises. An address whose routes have a ``header`` belongs to it for requests with
    that header.

    Attributes:
        name: identifies it in settings.
        api_version: version of this contract.
        routes: its addresses.
        request_id_header: a further response header with the id in ``X-Request-Id``; None: only that one.
        takes_any_type: bodies of any Content-Type are accepted, except from web pages.

    Calls:
        error: for each error on its addresses; server, thread of the plugin; microseconds.
    """

    name: str
    api_version: int
    routes: Sequence[Route]
    request_id_header: str | None
    takes_any_type: bool

    def error(self, error: ErrorAnswer) -> Reply:
        """Return the body of a response that reports an error; core adds the headers of the error.

        A ``status`` replaces the one of the error.
        """
        ...


def new_id(prefix: str) -> str:
    """Return an id for a request that no other one has."""
    return f"{prefix}{uuid.uuid4().hex}"
