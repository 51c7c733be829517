"""The contracts that a backend author implements: Backend, Runner, Tokenizer; and Engine.

A **backend** is what a plugin registers. It opens a **Runner** (a bare model: forward passes over
sequences, one thread) or an **Engine** (serves whole requests by itself, asynchronous). Core's
:class:`enginehouse.engine.loop.StepEngine` makes an engine of any runner; users of this module never
see which one they have.

A runner knows nothing of requests, sampling, stop strings, scheduling or text streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.types import EngineRequest, EngineStats, Event, ModelInfo, SamplingParams, Segment

__all__ = [
    "DRAW_FIELDS",
    "Backend",
    "CutPlanner",
    "DeviceOutput",
    "DeviceSampler",
    "Draw",
    "Drawn",
    "Engine",
    "ForwardOutput",
    "Generation",
    "LastSampled",
    "Match",
    "MemoryEstimate",
    "ModelSource",
    "Outputs",
    "Probe",
    "Progress",
    "Runner",
    "RunnerCapabilities",
    "Sampled",
    "Span",
    "StateKeeper",
    "Tokenizer",
]

Outputs = Literal["none", "last", "all"]
"""Which positions of a span give a row of logits."""

Progress = Callable[[float, str], None]
"""Called while a model loads with the share done (0 to 1) and what is being done; any thread."""


@frozen
class ModelSource:
    """Where a model comes from, as the user wrote it and as it was found.

    Attributes:
        text: what the user wrote (path, hub id, configured name).
        path: the file or folder on disk, when there is one.
    """

    text: str
    path: Path | None = None


@frozen
class Probe:
    """Whether a backend can run here. ``devices`` are names such as ``cpu`` or ``cuda:0``; ``reason`` says why not."""

    available: bool
    devices: tuple[str, ...] = ()
    reason: str = ""


@frozen
class Match:
    """How well a backend suits a source: 0 is "not at all", 1 is "made for it"; ``reason`` is shown to users."""

    score: float
    reason: str


@frozen
class MemoryEstimate:
    """Bytes a model will need. ``total_bytes`` is for the whole context that ``options`` ask for."""

    weights_bytes: int
    kv_bytes_per_token: int
    total_bytes: int


@runtime_checkable
class Backend(Protocol):
    """What a plugin registers. Cheap to create; never imports its library outside ``open``.

    ``options`` is an attrs class: the settings a model of this backend accepts in ``[models.<name>]``. A backend
    that opens runners gives it the fields ``context: int | None = None`` (longest sequence in tokens; None: the
    backend's default) and ``slots: int = 8`` (sequences that decode at once); the model manager fills these two
    from the generic settings of the same name, so users never write them twice.
    ``opens`` says whether ``open`` gives a Runner (hosted in a worker) or an Engine (lives in the server process).
    """

    name: str
    api_version: int
    options: type[Any]
    opens: Literal["runner", "engine"]

    def probe(self) -> Probe:
        """Whether this backend's library is installed, found without importing it."""
        ...

    def match(self, source: ModelSource) -> Match:
        """How well this backend suits ``source``; reads at most a few bytes of it."""
        ...

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        """Memory that ``open`` will need; raises ModelLoadError when the source cannot be read."""
        ...

    def open(self, source: ModelSource, options: Any, progress: Progress) -> Runner | Engine:
        """Load the model; called on the thread that will use the runner.

        Raises:
            MissingDependency: the library is not installed.
            ModelLoadError: the source is missing, damaged or not supported.
        """
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe and stateless.

    Attributes:
        vocab_size: number of ids; equals the width of a row of logits.
        token_bytes: ``vocab_size`` entries, the UTF-8 bytes (perhaps part of a character) of each id. For
            control tokens the bytes of their name.
        special_tokens: control-token string to id.
        control_token_ids: ids whose text is never shown.
        end_token_ids: ids that end a generation.
        prefix_token_ids: what the model expects before a raw text (for example BOS), often empty.
        max_bytes_per_token: most bytes of printable ASCII that one id stands for; None where some may be dropped or
            shortened, so that no number of tokens follows from the length of a text.
    """

    vocab_size: int
    token_bytes: Sequence[bytes]
    special_tokens: Mapping[str, int]
    control_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    prefix_token_ids: tuple[int, ...]
    max_bytes_per_token: int | None

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of ``text`` without prefix. Only with ``special`` are control-token strings control tokens."""
        ...


@frozen
class LastSampled:
    """Stands for the token that :meth:`DeviceSampler.sample` drew last for this sequence, still on the device."""


@frozen
class Span:
    """Tokens to append to one sequence in one forward pass.

    Attributes:
        sequence: handle from ``open_sequence`` or ``fork``; at most one span per sequence in a batch.
        start: must equal ``Runner.length(sequence)``.
        input: ``(num_tokens,)`` int32 token ids, at least one; or :class:`LastSampled` where supported.
        outputs: which positions give a row of logits.
        num_layers: run only this many layers, then the output norm and projection (self-drafting); None is all.
            Only with ``exit_layers``. The layers above get no keys and values for these tokens: until the sequence is
            truncated to ``start`` again, spans of more layers are refused on it.
        may_exit: it is one token of an answer, which a policy of early exit may let leave before the last layer; see
            ``enginehouse.contract.exit_policy``. Runners without such a policy take no notice.
    """

    sequence: int
    start: int
    input: NDArray[np.int32] | LastSampled
    outputs: Outputs = "last"
    num_layers: int | None = None
    may_exit: bool = False

    @property
    def num_tokens(self) -> int:
        """By how many tokens the sequence grows."""
        return 1 if isinstance(self.input, LastSampled) else len(self.input)


@runtime_checkable
class ForwardOutput(Protocol):
    """Rows of logits of one forward pass, in span order, within a span by position.

    A span with outputs ``none`` gives no row, ``last`` one, ``all`` one per token.
    """

    num_rows: int

    def host(self) -> NDArray[np.float32]:
        """``(num_rows, vocab_size)`` float32 logits, writable; valid until the next ``forward``."""
        ...


@runtime_checkable
class DeviceOutput(ForwardOutput, Protocol):
    """Rows that stay on a device; what a runner with ``sampling`` capabilities returns."""

    def select(self, rows: Sequence[int]) -> ForwardOutput:
        """Only these rows, in this order, so that no others need be copied to the host."""
        ...


@frozen(eq=False)
class Sampled:
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: its raw log-probability when the request asked for any, else None.
        top_ids: (num_logprobs,) int64, the most probable tokens of the raw model, best first; None like ``logprob``.
        top_logprobs: (num_logprobs,) float64, their raw log-probabilities.
    """

    token_id: int
    logprob: float | None = None
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float64] | None = None


DRAW_FIELDS = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "num_logprobs",
        "mask",
    }
)
"""Everything that a :class:`Draw` can say, in the words of ``RunnerCapabilities.sampling``."""


@frozen(eq=False, kw_only=True)
class Draw:
    """How the token behind one row of logits is drawn on the device; the order is core's sampling order.

    Attributes:
        row: which row of the forward pass.
        sequence: its handle; what is drawn becomes the :class:`LastSampled` of this sequence. Where a span has drafts,
            there may be a draw for each of its rows; then the next span of the sequence says its tokens itself.
        sampling: temperature, truncation and ``num_logprobs``; everything that is not default in it is something
            that the runner's ``capabilities.sampling`` names.
        number: in [0, 1), decides the draw; a function of seed, choice and position.
        bias_ids: (num_biased,) int64 token ids, each once, to whose logits ``bias_values``, float32, are added first;
            -inf bans a token.
        seen_ids: (num_seen,) int64 token ids that penalties are about; ``seen_counts``, float32, says how often the
            answer holds each.
        bitmask: (ceil(vocab_size / 32),) int32, which tokens may be drawn; None is every one.
    """

    row: int
    sequence: int
    sampling: SamplingParams
    number: float
    bias_ids: NDArray[np.int64] | None = None
    bias_values: NDArray[np.float32] | None = None
    seen_ids: NDArray[np.int64] | None = None
    seen_counts: NDArray[np.float32] | None = None
    bitmask: NDArray[np.int32] | None = None


class Drawn(Protocol):
    """Tokens on their way to the host."""

    def host(self) -> Sequence[Sampled]:
        """Wait for them; one per draw, in order. A token id of -1: the row had no finite maximum."""
        ...


@frozen(kw_only=True)
class RunnerCapabilities:
    """What a runner can do; the scheduler plans by it and the contract suite checks it.

    Attributes:
        max_sequences: handles open at once.
        max_batch_tokens: tokens in one forward pass, over all spans.
        max_context: longest sequence in tokens.
        cache_tokens: KV positions in total, over all sequences.
        prefill_chunk_tokens: prompt tokens that may share a step with decoding sequences without delaying them much.
        mixed_batch: spans of more than one token and spans of one token may share a forward pass.
        truncate: ``any`` length, ``bounded`` (may keep less than asked; see :class:`CutPlanner`), or ``none`` (only
            to 0).
        fork: ``share`` (no copy, shared positions counted once), ``copy``, or ``none`` (returns length 0).
        batch_invariant: greedy text never depends on what else is in the batch or how a prompt was chunked.
        exit_layers: layer counts that ``Span.num_layers`` accepts.
        abort: ``abort()`` interrupts a running forward pass; False: it has no effect.
        sampling: names of the fields of SamplingParams that the runner honours when it draws on the device itself, and
            ``mask`` where it takes bitmasks; not empty only for a :class:`DeviceSampler`. Core draws for all others.
        states: sequences can be saved and loaded; only for a :class:`StateKeeper`.
    """

    max_sequences: int
    max_batch_tokens: int
    max_context: int
    cache_tokens: int
    prefill_chunk_tokens: int = 256
    mixed_batch: bool = True
    truncate: Literal["any", "bounded", "none"] = "any"
    fork: Literal["share", "copy", "none"] = "copy"
    batch_invariant: bool = False
    exit_layers: tuple[int, ...] = ()
    abort: bool = False
    sampling: frozenset[str] = frozenset()
    states: bool = False


@runtime_checkable
class Runner(Protocol):
    """A loaded model that appends tokens to sequences and returns logits.

    Built, used and closed on one thread; only ``abort`` and ``tokenizer`` may be used from others. A
    sequence is a handle to KV positions; its length counts the tokens that it holds. Invariants: after
    ``forward`` the length of each sequence has grown by the number of tokens of its span; the logits of a
    position depend only on the sequence's token ids (exactly when ``batch_invariant``, else up to rounding).
    """

    capabilities: RunnerCapabilities
    tokenizer: Tokenizer
    info: ModelInfo

    def open_sequence(self) -> int:
        """A new, empty sequence. Raises CacheFull when ``max_sequences`` are open."""
        ...

    def free_sequence(self, sequence: int) -> None:
        """Give the sequence and its KV positions back."""
        ...

    def length(self, sequence: int) -> int:
        """Number of tokens that the sequence holds."""
        ...

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end; returns the length really kept, at most ``length`` (perhaps 0)."""
        ...

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that starts with the first ``length`` tokens of ``source``, which is not changed.

        Returns:
            The new handle and the length really shared, at most ``length`` (perhaps 0).

        Raises:
            CacheFull: no handle or no positions left.
        """
        ...

    def free_tokens(self) -> int:
        """KV positions free now. Freeing a sequence whose positions are shared may free nothing."""
        ...

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        """Append every span to its sequence in one pass.

        Raises:
            CacheFull: not enough positions; nothing was changed.
            StepAborted: ``abort()`` was called; some sequences may have grown, see its ``lengths``.
            InvalidSpan: a span breaks the contract; nothing was changed.
        """
        ...

    def abort(self) -> None:
        """Ask a running ``forward`` to stop soon; best effort, any thread."""
        ...

    def close(self) -> None:
        """Free everything; the runner is not used afterwards."""
        ...


@runtime_checkable
class CutPlanner(Runner, Protocol):
    """A runner whose ``truncate`` is ``bounded``, and which says beforehand what a cut would keep.

    With it, kept sequences are reused as far as they can be cut; without it, whole or not at all, for trying would
    cost a sequence each time, and a cut that keeps too little may cost everything.
    """

    def kept_length(self, sequence: int, length: int) -> int:
        """What ``truncate`` to this length, or ``fork`` at it, would keep now; nothing is changed."""
        ...


@runtime_checkable
class DeviceSampler(Runner, Protocol):
    """A runner that also draws tokens, where the logits are; its ``forward`` takes :class:`LastSampled` inputs.

    So the next pass can be launched before the tokens of the last one have reached the host. Nothing here waits but
    :meth:`Drawn.host`.
    """

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> Drawn:
        """Draw from rows of the last forward pass; call it once, before the next."""
        ...


@runtime_checkable
class StateKeeper(Runner, Protocol):
    """A runner whose sequences can leave memory and come back, also in another process.

    Attributes:
        state_format: everything besides the model's own files that a saved sequence depends on: the library and its
            version, types and layout of the cache. States are loaded only where this text is the same.
    """

    state_format: str

    def save(self, sequence: int) -> memoryview:
        """A copy of everything that the sequence holds, bytes; the sequence stays as it is."""
        ...

    def load(self, data: memoryview) -> int:
        """A new sequence that goes on as the saved one would have.

        Whoever kept the data has checked that it is what :meth:`save` returned; its length and its head are checked
        here once more, for a library may end the process on wrong ones. Nothing is changed when this raises.

        Raises:
            CacheFull: no handle or no positions left.
            StateRefused: it is damaged, or of another model or other settings.
        """
        ...


class Generation(Protocol):
    """A request that an engine has accepted.

    Iterating gives batches of events as they happen, at least one event in each, and ends after
    :class:`enginehouse.contract.types.RequestFinished`; it raises an EnginehouseError when the request fails.
    """

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; some engines learn it with the end."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Batches of events; may be iterated once."""
        ...

    def cancel(self) -> None:
        """Stop generating and free the slot; idempotent, also after the end. Iteration then just ends."""
        ...


class Engine(Protocol):
    """Serves whole requests. Used from the server's event loop only."""

    info: ModelInfo

    async def submit(self, request: EngineRequest) -> Generation:
        """Queue a request; returns when it is accepted, before any token is made.

        Raises:
            RequestError: the request cannot be served (too long, bad ids, unsupported field).
            Overloaded: the queue is full.
            EngineDead: the engine is gone.
        """
        ...

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Token ids of a prompt, exactly as ``submit`` would encode it."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens by name; raises InvalidRequest for ids outside the vocabulary."""
        ...

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id, as in ``Tokenizer.token_bytes``; raises like ``detokenize``."""
        ...

    async def stats(self) -> EngineStats:
        """What the engine is doing now."""
        ...

    async def close(self) -> None:
        """Stop; running requests end with EngineDead."""
        ...
