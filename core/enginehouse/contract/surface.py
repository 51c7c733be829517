"""The contract of surfaces, the APIs that clients speak: routes, request bodies, responses, frames and error bodies.

Implemented by plugin authors, and by core for OpenAI's API. Core serves the routes of a surface: it checks keys, scopes
and limits, decodes bodies strictly, queues, cancels when the client disconnects, counts and logs. A surface translates:
a body to :class:`~enginehouse.contract.types.GenerateRequest` values, and pieces of output to chunks. It knows no
sockets, keys, engines or models.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from attrs import field, frozen

from enginehouse.contract.identity import Scope
from enginehouse.contract.types import GenerateRequest, TokenLogprob

__all__ = [
    "NDJSON",
    "SSE",
    "Answer",
    "Assembler",
    "Call",
    "CallPiece",
    "Chunk",
    "ErrorAnswer",
    "Frame",
    "GenerationRoute",
    "Piece",
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


class Piece(msgspec.Struct, gc=False):
    """Addition to one choice: text with its log-probabilities, reasoning, part of a call, or the end.

    ``finish_reason`` is an engine's, or ``tool_calls``. ``scores`` are members that describe the prompt, and come
    before everything else.
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    call: CallPiece | None = None
    scores: dict[str, Any] | None = None


@frozen
class ErrorAnswer:
    """An error ready to send: as a response before the first byte, as a chunk after it.

    Attributes:
        status: the HTTP status that fits, also if another one was sent already.
        kind: class of errors, such as ``invalid_request_error`` or ``rate_limit_error``.
        code: name of the error, such as ``model_not_found``; docs/troubleshooting.md lists them.
        param: path of the request field that is wrong, if any.
        headers: response headers, such as ``retry-after``.
    """

    status: int
    message: str
    kind: str
    code: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@frozen(kw_only=True)
class Frame:
    """The format in which the chunks of a stream are written.

    Attributes:
        media_type: of the response.
        before: bytes before each chunk, and ``after`` it.
        last: bytes at the end of a complete stream; clients take a stream without them for a truncated one.
        ping: bytes that keep the connection open while nothing is generated; clients ignore them.
    """

    media_type: str
    before: bytes = b""
    after: bytes = b"\n"
    last: bytes = b""
    ping: bytes = b"\n"


SSE = Frame(
    media_type="text/event-stream; charset=utf-8",
    before=b"data: ",
    after=b"\n\n",
    last=b"data: [DONE]\n\n",
    ping=b": ping\n\n",
)
"""Server-sent events without names, ended as OpenAI ends them."""

NDJSON = Frame(media_type="application/x-ndjson")
"""One JSON object per line; empty lines in between are ignored."""


class Call(Protocol):
    """A request that has passed keys, scopes and limits, with its decoded body."""

    @property
    def body(self) -> Any:
        """An instance of the route's body class."""
        ...


class Answer(Protocol):
    """The response to requests that their model has accepted."""

    @property
    def id(self) -> str:
        """Id of the first request."""
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


class Assembler(Protocol):
    """The state machine that writes one response; created per request, used on the event loop.

    It receives every piece of output in order, whether the response is streamed or not, so that a stream and a whole
    response are made of the same items.
    """

    def opening(self) -> Iterable[Chunk]:
        """Return the chunks of a stream before the first piece."""
        ...

    def push(self, piece: Piece) -> Iterable[Chunk | msgspec.Raw]:
        """Add a piece; returns the chunks that can be sent now, which are ignored if the response is not streamed.

        This runs for every token; a chunk may be prepared JSON (``msgspec.Raw``).
        """
        ...

    def close(self, usage: dict[str, Any], details: dict[str, Any] | None) -> Iterable[Chunk]:
        """Return the last chunks of a stream that is complete.

        Args:
            usage: the token counts, as in OpenAI's usage object.
            details: value of the extension member ``enginehouse``, if the client asked for it.
        """
        ...

    def fail(self, error: ErrorAnswer) -> Iterable[Chunk]:
        """Return the last chunks of a stream that breaks off; they report the error."""
        ...

    def whole(self, usage: dict[str, Any], details: dict[str, Any] | None) -> Chunk:
        """Return the response that is not streamed, once every piece was pushed; may run in a thread."""
        ...


@frozen(kw_only=True)
class Route:
    """An address of a surface.

    Attributes:
        path: such as ``/v1/messages``; ``{name:str}`` and ``{name:path}`` are parameters.
        name: identifies the operation in the OpenAPI document, like ``summary`` and the schemas.
        body: attrs class of the request body, decoded strictly: values are never coerced, and unknown members are
            listed in the header ``X-Enginehouse-Ignored``. None: the request has no body.
        scope: permission that the caller's key needs.
        limits: limits of the caller that count a request: ``all``, ``concurrency`` or none.
        request_schema: JSON Schema of the body; None derives it from ``body``.
        response_schema: JSON Schema of the response.
    """

    method: Literal["GET", "POST"] = "POST"
    path: str
    name: str
    summary: str
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
            invalid; called in a thread for large bodies.
        assemble: returns the writer of the response, once every prompt is accepted; cancelled if the client leaves.
        frame: format of streams.
        chunk_schema: JSON Schema of the chunks of a stream.
    """

    body: type[Any]
    requests: Callable[[Any], Sequence[GenerateRequest]]
    assemble: Callable[[Any, Any], Awaitable[Assembler]]
    limits: Literal["all"] = "all"
    frame: Frame = SSE
    chunk_schema: Mapping[str, Any] = field(factory=lambda: {"type": "object"})


class Surface(Protocol):
    """An API that clients speak; ``name`` is listed in the setting ``server.surfaces``.

    ``requests`` of a route gets a :class:`Call`, ``assemble`` a :class:`Call` and an :class:`Answer`. An address, and
    every one below it, belongs to the surface: its errors have the surface's body there, whoever raises them.
    """

    name: str
    api_version: int
    routes: Sequence[Route]

    def error(self, error: ErrorAnswer) -> Chunk:
        """Return the body of a response that reports an error; core sets its status and headers."""
        ...


def new_id(prefix: str) -> str:
    """Return an id for a request that no other one has."""
    return f"{prefix}{uuid.uuid4().hex}"
