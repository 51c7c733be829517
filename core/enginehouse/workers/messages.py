"""What the server process and a worker say to each other.

Every message is one tagged msgpack array in one frame (see ``link``). The worker sends at most one
:class:`StepOutputs` per step, however many requests ran in it.
"""

# Annotations are resolved by msgspec when this module is imported, so no name may hide in TYPE_CHECKING.
from typing import Any, Literal

import msgspec

from enginehouse.contract.errors import EnginehouseError, error_from_fields
from enginehouse.contract.inspection import EngineFigures, EngineView
from enginehouse.contract.types import (
    CacheMiss,
    EngineRequest,
    EngineSettings,
    EngineStats,
    Event,
    ModelInfo,
    Resume,
    Segment,
)
from enginehouse.settings.config import PluginsSettings

__all__ = [
    "Accepted",
    "Begun",
    "CallFailed",
    "Cancel",
    "Close",
    "Detokenize",
    "Detokenized",
    "Died",
    "DrafterLoad",
    "Entered",
    "ExitPolicyLoad",
    "Failure",
    "Figures",
    "FromWorker",
    "GetStats",
    "GetView",
    "Hello",
    "Left",
    "Load",
    "LoadFailed",
    "LoadProgress",
    "ModelLoad",
    "PrefixDiskLoad",
    "Ready",
    "Rejected",
    "Stage",
    "Started",
    "Stats",
    "StepOutputs",
    "StopThinking",
    "Submit",
    "ThinkingStopped",
    "ToWorker",
    "Tokenize",
    "Tokenized",
    "View",
    "decode_from_worker",
    "decode_to_worker",
    "encode",
    "failure_of",
    "printable",
]


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """An :class:`EnginehouseError` as plain data."""

    fields: dict[str, Any]

    def to_error(self) -> EnginehouseError:
        """The error it stands for."""
        return error_from_fields(self.fields)


def failure_of(error: EnginehouseError) -> Failure:
    """The error as a value that crosses the link."""
    return Failure({name: printable(value) for name, value in error.to_fields().items()})


def printable(value: Any) -> Any:
    """A text without lone surrogates, as file names and libraries' messages may hold them; other values as they are."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


# -- server to worker ------------------------------------------------------------------------------


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A further model to open; its fields are those of :class:`Load`."""

    backend: str
    source_text: str
    source_path: str | None
    options: dict[str, Any]
    options_path: str


class DrafterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter to bind to the model, with its own settings as plain data and the second model that it uses."""

    name: str
    options: dict[str, Any]
    options_path: str
    model: ModelLoad | None = None


class ExitPolicyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of early exit to bind to the model, with its own settings as plain data."""

    name: str
    options: dict[str, Any]
    options_path: str


class PrefixDiskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Where sequences of the prefix cache are saved.

    Attributes:
        folder: this model's own.
        setting: dotted path of the setting that asks for it, for messages.
    """

    folder: str
    max_bytes: int
    setting: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The first message: which model to open, and how.

    Attributes:
        options: the backend's settings as plain data; the worker reads them with the backend's class.
        options_path: dotted path of the options in the configuration, for messages.
        plugins: which plugins the worker loads, and their options.
        drafters: what proposes tokens for it, in order of preference.
        exit_policy: what lets its tokens leave early.
        prefix_disk: where its prefix cache is saved; None is nowhere.
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


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Serve a request; answered by Accepted or Rejected, then by its share of StepOutputs.

    Attributes:
        resume: what was answered before; such a request was accepted once and is not refused for a full queue.
    """

    request: EngineRequest
    resume: Resume | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Forget a request; answered by Left."""

    request_id: str


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
    """Answered by Stats, after the running step."""

    call: int


class GetView(msgspec.Struct, frozen=True, array_like=True, tag="get_view"):
    """Answered by View, after the running step."""

    call: int


class StopThinking(msgspec.Struct, frozen=True, array_like=True, tag="stop_thinking"):
    """Close the reasoning of a request; answered by ThinkingStopped, after the running step."""

    call: int
    request_id: str


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Free the model and end; not answered."""


ToWorker = Load | Submit | Cancel | Tokenize | Detokenize | GetStats | GetView | StopThinking | Close


# -- worker to server ------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message, before Load is read: who the worker is. Its form never changes.

    Attributes:
        protocol: number of the language that it speaks.
        version: of its enginehouse.
        python: version of its Python.
        prefix: folder of its environment.
    """

    protocol: int
    version: str
    python: str
    prefix: str


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """The model is loading. ``share`` is what is done, 0 to 1."""

    share: float
    text: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded; requests may come."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model could not be opened; the worker ends."""

    failure: Failure


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request fits and is queued."""

    request_id: str
    num_prompt_tokens: int


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request was refused; nothing else follows for it."""

    request_id: str
    failure: Failure


Stage = Literal["waiting", "text", "constraint", "request"]
"""On what of a piece of work the worker is working: on nothing, on its text, on its constraint, or on all of it."""


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """Work on a request (its id) or a call (its number) begins; sent before anything is done of it."""

    work: str | int
    stage: Stage


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Answer to Cancel: nothing works on the request any more."""

    request_id: str


class Entered(msgspec.Struct, frozen=True, array_like=True, tag="entered"):
    """The engine holds the request; plugins' code for it has run without harm."""

    request_id: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The request has left the queue; sent before anything of it is computed.

    Attributes:
        num_cached_tokens: tokens of its prompt that need not be computed.
        num_loaded_tokens: of these, how many came from the disk.
        cache_miss: why there are no more.
    """

    request_id: str
    num_cached_tokens: int
    num_loaded_tokens: int = 0
    cache_miss: CacheMiss | None = None


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that one step gave, as (request id, what happened); a Failure ends its request."""

    outputs: list[tuple[str, Event | Failure]]


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag="tokenized"):
    """Answer to Tokenize."""

    call: int
    token_ids: list[int]


class Detokenized(msgspec.Struct, frozen=True, array_like=True, tag="detokenized"):
    """Answer to Detokenize: the bytes of each id."""

    call: int
    pieces: list[bytes]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Answer to GetStats."""

    call: int
    stats: EngineStats


class View(msgspec.Struct, frozen=True, array_like=True, tag="view"):
    """Answer to GetView."""

    call: int
    view: EngineView


class ThinkingStopped(msgspec.Struct, frozen=True, array_like=True, tag="thinking_stopped"):
    """Answer to StopThinking: of how many choices."""

    call: int
    num_choices: int


class Figures(msgspec.Struct, frozen=True, array_like=True, tag="figures"):
    """What the engine has counted; nobody asks for it, it comes about once a second while the engine works."""

    figures: EngineFigures


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag="call_failed"):
    """Answer to a call that was refused."""

    call: int
    failure: Failure


class Died(msgspec.Struct, frozen=True, array_like=True, tag="died"):
    """The last message of a worker that must end because its engine broke."""

    reason: str


FromWorker = (
    Hello
    | LoadProgress
    | Ready
    | LoadFailed
    | Accepted
    | Begun
    | Left
    | Rejected
    | Entered
    | Started
    | StepOutputs
    | Tokenized
    | Detokenized
    | Stats
    | View
    | ThinkingStopped
    | Figures
    | CallFailed
    | Died
)

# Errors may carry fields of any type (plugins raise them too); what msgpack does not know travels as its repr.
_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """The payload of one frame.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate, which is no character.
    """
    return _encoder.encode(message)


def decode_to_worker(payload: bytes | bytearray | memoryview) -> ToWorker:
    """A message of the server. Raises msgspec.DecodeError when it is none."""
    return _to_worker.decode(payload)


def decode_from_worker(payload: bytes | bytearray | memoryview) -> FromWorker:
    """A message of a worker. Raises msgspec.DecodeError when it is none."""
    return _from_worker.decode(payload)
