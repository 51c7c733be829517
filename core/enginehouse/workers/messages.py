"""Messages between the server process and a worker.

Every message is one tagged msgpack array in one frame (see ``ipc``). A step of a worker sends one :class:`StepOutputs`.
"""

# msgspec resolves annotations when this module is imported, so names must not be imported under TYPE_CHECKING.
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.errors import EnginehouseError, InvalidRequest, error_from_fields
from enginehouse.contract.inspection import EngineMetrics, EngineView
from enginehouse.contract.types import (
    CacheMiss,
    EngineRequest,
    EngineSettings,
    EngineStats,
    Event,
    ModelInfo,
    PoolingRequest,
    PoolingResult,
    Resume,
    Segment,
)
from enginehouse.contract.usage import Usage
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.ipc import FrameTooLarge, frame

PROTOCOL = 12  # increase whenever the messages change


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """An :class:`EnginehouseError` as plain data."""

    fields: dict[str, Any]

    def to_error(self) -> EnginehouseError:
        """Return the error that this describes."""
        return error_from_fields(self.fields)


def failure_of(error: EnginehouseError) -> Failure:
    """Return the error as a value that can be sent over the link."""
    return Failure({name: printable(value) for name, value in error.to_fields().items()})


def printable(value: Any) -> Any:
    """Escape lone surrogates, as in file names and library messages, if ``value`` is a text; else return it as is."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


# -- server to worker ------------------------------------------------------------------------------


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An additional model to open; the fields are those of :class:`Load`."""

    backend: str
    source_text: str
    source_path: str | None
    options: dict[str, Any]
    options_path: str


class DrafterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter to bind to the model: its own settings as plain data, and its second model or draft head."""

    name: str
    options: dict[str, Any]
    options_path: str
    model: ModelLoad | None = None


class ExitPolicyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An early-exit policy to bind to the model, with its own settings as plain data."""

    name: str
    options: dict[str, Any]
    options_path: str


class PrefixDiskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Disk tier of the prefix cache: folder for its saved sequences.

    Attributes:
        folder: folder of this model only.
        setting: dotted path of the setting that enables it, for messages.
    """

    folder: str
    max_bytes: int
    setting: str


class PoolingLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pooling model.

    Attributes:
        cache_bytes: memory for rows of earlier requests.
        rerank: how a model that is not for the task ``rerank`` answers it; None: not at all.
        template: prompt of a generative reranker, with ``{query}`` and ``{document}``; None: the model's own or the
            usual one.
        answers: the tokens whose logits are compared: of a relevant document, and of another one.
    """

    cache_bytes: int = 0
    rerank: Literal["cosine", "yes_no"] | None = None
    template: str | None = None
    answers: tuple[str, str] = ("yes", "no")


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first message: the model to open and its settings.

    Attributes:
        options: the backend's settings as plain data; the worker structures them with the backend's class.
        options_path: dotted path of the options in the configuration, for messages.
        plugins: plugins that the worker loads, and their options.
        drafters: drafters of the model, in order of preference.
        exit_policy: early-exit policy of the model.
        prefix_disk: disk tier of its prefix cache; None disables it.
        plugin_timeout_s: time limit for compiling a constraint by a decoder that is not our own.
        pooling: settings of a pooling model.
        adapters: adapters to load with the model, as far as there are places for them.
    """

    backend: str
    source_text: str
    source_path: str | None
    options: dict[str, Any]
    options_path: str
    engine: EngineSettings
    plugins: PluginsSettings
    drafters: tuple[DrafterLoad, ...] = ()
    exit_policy: ExitPolicyLoad | None = None
    prefix_disk: PrefixDiskLoad | None = None
    plugin_timeout_s: float = 10.0
    pooling: PoolingLoad = PoolingLoad()
    adapters: tuple[Adapter, ...] = ()


class MediaBytes(msgspec.Struct, frozen=True, array_like=True, tag="media_bytes"):
    """A piece of the image ``place`` of a prompt, before the message with ``call``; empty data drops all of them."""

    call: int
    place: int
    data: bytes


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Serve a request, or continue it by ``resume``; answered by Accepted or Rejected, then by StepOutputs."""

    request: EngineRequest
    resume: Resume | None = None
    media_call: int = -1


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Drop a request; answered by Left."""

    request_id: str


class Pool(msgspec.Struct, frozen=True, array_like=True, tag="pool"):
    """Compute the rows of a request; answered by PoolAccepted, then by Pooled; or by CallFailed."""

    call: int
    request: PoolingRequest


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag="cancel_call"):
    """Drop a Pool that is not answered yet; answered by CallFailed, if not by Pooled."""

    call: int


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """Encode a prompt; answered by Tokenized or CallFailed with the same call number."""

    call: int
    segments: tuple[Segment, ...]
    add_special: bool


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag="detokenize"):
    """Decode token ids; answered by Detokenized or CallFailed."""

    call: int
    token_ids: tuple[int, ...]


class GetStats(msgspec.Struct, frozen=True, array_like=True, tag="get_stats"):
    """Get statistics; answered by Stats, after the running step."""

    call: int


class GetView(msgspec.Struct, frozen=True, array_like=True, tag="get_view"):
    """Get a snapshot; answered by View, after the running step."""

    call: int


class GetCached(msgspec.Struct, frozen=True, array_like=True, tag="get_cached"):
    """Get how much of a prompt the prefix cache holds; answered by Cached, after the running step."""

    call: int
    token_ids: tuple[int, ...]
    namespace: str


class StopThinking(msgspec.Struct, frozen=True, array_like=True, tag="stop_thinking"):
    """Force the end of a request's reasoning; answered by ThinkingStopped, after the running step."""

    call: int
    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load an adapter, or unload it after its last use; answered by Stats or CallFailed, after the running step."""

    call: int
    adapter: Adapter
    removes: bool = False


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Free the model and exit; not answered."""


ToWorker = (
    Load
    | MediaBytes
    | Submit
    | Cancel
    | Pool
    | CancelCall
    | Tokenize
    | Detokenize
    | GetStats
    | GetView
    | GetCached
    | StopThinking
    | LoadAdapter
    | Close
)


# -- worker to server ------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message, sent before Load is read: identifies the worker. Its format never changes.

    Attributes:
        protocol: protocol number.
        version: version of the worker's enginehouse.
        python: version of its Python.
        prefix: folder of its environment.
    """

    protocol: int
    version: str
    python: str
    prefix: str


def own_hello() -> Hello:
    """Return the Hello of this process."""
    try:
        own_version = version("enginehouse")
    except PackageNotFoundError:  # run from its sources
        own_version = "unknown"
    return Hello(PROTOCOL, own_version, platform.python_version(), sys.prefix)


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The model is loading. ``share`` is the completed part, 0 to 1."""

    share: float
    text: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded; requests may be sent."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model could not be opened; the worker exits."""

    failure: Failure


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request fits and is queued.

    Attributes:
        prompt_token_ids: only of a request with ``return_token_ids``.
    """

    request_id: str
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request was refused; no other message follows for it."""

    request_id: str
    failure: Failure


Stage = Literal["waiting", "text", "constraint", "request"]
"""The part of a request or call on which the worker is working: none, its text, its constraint, or all of it."""


class StageBegan(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Work on a request (identified by its id) or a call (by its number) begins; sent before any of it is done."""

    work: str | int
    stage: Stage


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Answer to Cancel: the worker no longer works on the request."""

    request_id: str


class Entered(msgspec.Struct, frozen=True, array_like=True, tag="entered"):
    """The engine holds the request; all plugin code for it has run without error."""

    request_id: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The request has left the queue; sent before anything of it is computed.

    Attributes:
        usage: has the prompt tokens that are in the prefix cache and need not be computed.
        cache_miss: reason why there are no more.
    """

    request_id: str
    usage: Usage
    cache_miss: CacheMiss | None = None


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All outputs of one step, as (request id, output); a Failure ends its request."""

    outputs: list[tuple[str, Event | Failure]]


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """Answer to Tokenize."""

    call: int
    token_ids: list[int]


class Detokenized(msgspec.Struct, frozen=True, array_like=True, tag="detokenized"):
    """Answer to Detokenize: the bytes of each id."""

    call: int
    pieces: list[bytes]


class PoolAccepted(msgspec.Struct, frozen=True, array_like=True, tag="pool_accepted"):
    """A Pool can be served, and is queued; ``num_tokens`` are those of all of its texts."""

    call: int
    num_tokens: int


class Pooled(msgspec.Struct, frozen=True, array_like=True, tag="pooled"):
    """Answer to Pool."""

    call: int
    result: PoolingResult


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Answer to GetStats and LoadAdapter."""

    call: int
    stats: EngineStats


class View(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """Answer to GetView."""

    call: int
    view: EngineView


class Cached(msgspec.Struct, frozen=True, array_like=True, tag="cached"):
    """Answer to GetCached: the number of leading tokens that it holds."""

    call: int
    num_tokens: int


class ThinkingStopped(msgspec.Struct, frozen=True, array_like=True, tag="thinking_stopped"):
    """Answer to StopThinking: the number of choices whose reasoning was ended."""

    call: int
    num_choices: int


class MetricsReport(msgspec.Struct, frozen=True, array_like=True, tag="metrics"):
    """Statistics of the engine; sent without a request, about once a second while the engine works."""

    metrics: EngineMetrics


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag="call_failed"):
    """Answer to a call that was refused or failed."""

    call: int
    failure: Failure


class Died(msgspec.Struct, frozen=True, array_like=True, tag="died"):
    """The last message of a worker that must exit because its engine failed."""

    reason: str


FromWorker = (
    Hello
    | LoadProgress
    | Ready
    | LoadFailed
    | Accepted
    | StageBegan
    | Left
    | Rejected
    | Entered
    | Started
    | StepOutputs
    | Tokenized
    | Detokenized
    | PoolAccepted
    | Pooled
    | Stats
    | View
    | Cached
    | ThinkingStopped
    | MetricsReport
    | CallFailed
    | Died
)

# Errors may carry fields of any type, also those of plugins; types unknown to msgpack are sent as their repr.
_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Encode the payload of one frame.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate, which is not a character.
    """
    return _encoder.encode(message)


def pack(message: ToWorker) -> bytes:
    """Encode a message of the server as one frame.

    Raises:
        InvalidRequest: the message is too large, or holds a lone surrogate or a number wider than 64 bits.
    """
    try:
        return frame(encode(message))
    except UnicodeEncodeError as error:
        raise InvalidRequest("The text holds a lone surrogate, which is not a character.", "messages") from error
    except (OverflowError, RecursionError) as error:
        reason = "The request holds a number that does not fit into 64 bits, or is nested too deeply."
        raise InvalidRequest(reason) from error
    except FrameTooLarge as error:
        raise InvalidRequest(f"The request is too large for the model's worker: {error}.", "messages") from error


def decode_to_worker(payload: bytes | bytearray | memoryview) -> ToWorker:
    """Decode a message of the server. Raises msgspec.DecodeError if it is not valid."""
    return _to_worker.decode(payload)


def decode_from_worker(payload: bytes | bytearray | memoryview) -> FromWorker:
    """Decode a message of a worker. Raises msgspec.DecodeError if it is not valid."""
    return _from_worker.decode(payload)
