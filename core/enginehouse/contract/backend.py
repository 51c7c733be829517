"""The contracts that a backend author implements: Backend, Runner, Tokenizer.

A **backend** is the object that a plugin registers. It opens a **Runner** (a bare model: forward passes over sequences,
one thread), a **Pooler** (a model that gives one row per text; :mod:`enginehouse.contract.pooler`) or an **Engine**
(serves whole requests by itself, asynchronous; :mod:`enginehouse.contract.engine`). Core's
``enginehouse.engine.loop.StepEngine`` turns any runner into an engine.

A runner does not know requests, sampling, stop strings, scheduling or text streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from enginehouse.contract.adapters import AdapterMixing, AdapterSet
from enginehouse.contract.engine import Engine
from enginehouse.contract.media import MediaInput, MediaKind
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.types import ModelInfo, SamplingParams

__all__ = [
    "DRAW_FIELDS",
    "HIGHEST_TEMPERATURE",
    "LOWEST_LOGPROB",
    "LOWEST_TEMPERATURE",
    "Backend",
    "CutPlanner",
    "DeviceOutput",
    "DeviceSampler",
    "Draw",
    "Drawn",
    "ForwardOutput",
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
"""Positions of a span that produce a row of logits."""

Progress = Callable[[float, str], None]
"""Called while a model loads, from any thread, with the fraction done (0 to 1) and the current activity."""


@frozen
class ModelSource:
    """A model's location, as the user wrote it and as it was resolved.

    Attributes:
        text: the user's text (path, hub id, configured name).
        path: the file or folder on disk, if there is one.
    """

    text: str
    path: Path | None = None


@frozen
class Probe:
    """Availability of a backend on this machine.

    ``devices`` are names such as ``cpu`` or ``cuda:0``; ``reason`` explains why the backend is not available.
    """

    available: bool
    devices: tuple[str, ...] = ()
    reason: str = ""


@frozen
class Match:
    """Suitability of a backend for a source: 0 is unsuitable, 1 is made for it; ``reason`` is shown to users."""

    score: float
    reason: str


@frozen
class MemoryEstimate:
    """Bytes that a model will need. ``total_bytes`` covers the whole context that ``options`` request."""

    weights_bytes: int
    kv_bytes_per_token: int
    total_bytes: int
    by_device: Mapping[str, int] = field(factory=dict)  # where known; the memory budget counts its "CPU" alone


@runtime_checkable
class Backend(Protocol):
    """A backend as registered by a plugin. Cheap to create; its library is imported only in ``open``.

    ``options`` is an attrs class: the settings that a model of this backend accepts in ``[models.<name>]``. A backend
    that opens runners declares the fields ``context: int | None = None`` (longest sequence in tokens; None: the
    backend's default) and ``slots: int = 8`` (sequences that decode concurrently); the model manager fills both from
    the generic settings of the same name, so users never write them twice. ``opens`` states the result of ``open``:
    ``"model"`` is a Runner or, for a pooling model, a Pooler, in a worker; ``"engine"`` is an Engine in the server
    process. A backend with ``"workers"`` is never opened: it places workers, see :mod:`enginehouse.contract.fleet`.

    Calls:
        probe: for each model that is planned, and by commands; server, planning thread; milliseconds, 60 s at
            most.
        match: for each source that is planned; server, planning thread; milliseconds, 60 s at most.
        estimate: before each load; server, a thread for it; a second, 60 s at most.
        open: for each load; worker, engine thread (an engine: server, a thread for it); no limit while
            ``progress`` changes, see ``load_timeout_s``.
    """

    name: str
    api_version: int
    options: type[Any]
    opens: Literal["model", "engine", "workers"]

    def probe(self) -> Probe:
        """Check that this backend's library is installed, without importing it."""

    def match(self, source: ModelSource) -> Match:
        """Rate the suitability of this backend for ``source``; reads at most a few bytes of it."""

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        """Estimate the memory that ``open`` will need. Raises ModelLoadError if the source cannot be read."""

    def open(self, source: ModelSource, options: Any, progress: Progress) -> Runner | Pooler | Engine:
        """Load the model; called on the thread that will use the runner.

        Raises:
            MissingDependency: the library is not installed.
            ModelLoadError: the source is missing, damaged or not supported; or ``options.context`` is above the model's
                limit: the message gives both numbers.
        """


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe and stateless.

    Attributes:
        vocab_size: number of ids; equals the width of a row of logits.
        token_bytes: ``vocab_size`` entries, the UTF-8 bytes of each id, possibly part of a character; for control
            tokens, the bytes of their name.
        special_tokens: control-token string to id.
        control_token_ids: ids whose text is not shown.
        end_token_ids: ids that end a generation.
        prefix_token_ids: prefix that the model expects before raw text (for example BOS), often empty.
        max_bytes_per_token: maximum bytes of printable ASCII per id; None if encoding may drop or shorten text, so that
            its length gives no bound on the number of tokens.

    Calls:
        encode: for each prompt and stop string; worker, intake threads and engine thread at once; microseconds
            per word, ``step_timeout_s`` at most.
    """

    vocab_size: int
    token_bytes: Sequence[bytes]
    special_tokens: Mapping[str, int]
    control_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    prefix_token_ids: tuple[int, ...]
    max_bytes_per_token: int | None

    def encode(self, text: str, special: bool) -> list[int]:
        """Encode ``text`` without the prefix. Control-token strings become control tokens only with ``special``.

        The ``token_bytes`` of the ids join to the text's UTF-8: characters outside the vocabulary become byte tokens,
        never an unknown id. Exceptions are a model's own rules: a space before the text, normalised Unicode, dropped or
        merged white space, and in a vocabulary without byte tokens, dropped characters. If such a rule can shorten
        printable ASCII or line feeds, ``max_bytes_per_token`` is None.
        """


@frozen
class LastSampled:
    """Placeholder for the last token that :meth:`DeviceSampler.sample` drew for this sequence, still on the device."""


@frozen
class Span:
    """Tokens to append to one sequence in one forward pass.

    Attributes:
        sequence: handle from ``open_sequence`` or ``fork``; at most one span per sequence in a batch.
        start: must equal ``Runner.length(sequence)``.
        input: ``(num_tokens,)`` int32 token ids, at least one; where supported, :class:`LastSampled` or a chunk.
        outputs: positions that produce a row of logits.
        num_layers: run only this many layers, then the output norm and projection (self-drafting); None is all.
            Requires ``exit_layers``. The layers above get no keys and values for these tokens, so spans with more
            layers are refused on this sequence until it is truncated to ``start``.
        may_exit: the span is one generated token that an early exit policy may exit before the last layer; see
            ``enginehouse.contract.exit_policy``. Ignored by runners without such a policy.
        adapter: adapters of the sequence; the same in all of its spans. Requires ``adapters``.
    """

    sequence: int
    start: int
    input: NDArray[np.int32] | LastSampled | MediaInput
    outputs: Outputs = "last"
    num_layers: int | None = None
    may_exit: bool = False
    adapter: AdapterSet = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens by which the sequence grows."""
        return 1 if isinstance(self.input, LastSampled) else len(self.input)


@runtime_checkable
class ForwardOutput(Protocol):
    """Rows of logits of one forward pass, in span order, then by position.

    A span with outputs ``none`` has no row, ``last`` one, ``all`` one per token.

    Calls:
        host: once per pass, unless all tokens are sampled on the device; engine thread; part of the step.
    """

    num_rows: int

    def host(self) -> NDArray[np.float32]:
        """``(num_rows, vocab_size)`` float32 logits, writable; valid until the next ``forward``."""


@runtime_checkable
class DeviceOutput(ForwardOutput, Protocol):
    """Logits that stay on the device; returned by runners with ``sampling`` capabilities.

    Calls:
        select: at most once per pass; worker, engine thread; part of the step.
    """

    def select(self, rows: Sequence[int]) -> ForwardOutput:
        """Return only these rows, in this order, so that no others are copied to the host."""


@frozen(eq=False)
class Sampled:
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: its raw log-probability if the request asked for log-probabilities, else None.
        top_ids: (num_logprobs,) int64, the most probable tokens of the raw model, best first; None like ``logprob``.
        top_logprobs: (num_logprobs,) float64, their raw log-probabilities.
    """

    token_id: int
    logprob: float | None = None
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float64] | None = None


LOWEST_LOGPROB = -9999.0
"""Log-probability that is reported for impossible tokens, as by OpenAI's API: JSON has no -inf."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30
"""Limits of float32 arithmetic; a temperature that is not 0 is brought between them."""

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
"""All values that ``RunnerCapabilities.sampling`` may contain."""


@frozen(eq=False, kw_only=True)
class Draw:
    """Parameters for sampling one token on the device from one row of logits, in core's sampling order.

    Attributes:
        row: index of the row in the forward pass.
        sequence: handle of the sequence; the token drawn becomes its :class:`LastSampled`. If a span has drafts, there
            may be one draw for each of its rows; then the next span of the sequence gives its token ids itself.
        sampling: temperature, truncation and ``num_logprobs``; every field that differs from its default is named in
            the runner's ``capabilities.sampling``.
        number: uniform number in [0, 1) that decides the draw; a function of seed, choice and position.
        bias_ids: (num_biased,) int64 distinct token ids; ``bias_values``, float32, are added to their logits first;
            -inf bans a token.
        seen_ids: (num_seen,) int64 token ids subject to penalties; ``seen_counts``, float32, is the number of
            occurrences of each in the answer.
        bitmask: (ceil(vocab_size / 32),) int32, the allowed tokens; None allows all.
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
    """Sampled tokens that are being copied to the host.

    Calls:
        host: once per pass; worker, engine thread; waits for the device.
    """

    def host(self) -> Sequence[Sampled]:
        """Wait for the tokens; one per draw, in order. A token id of -1 means that the row had no finite maximum."""


@frozen(kw_only=True)
class RunnerCapabilities:
    """Capabilities of a runner, used by the scheduler and checked by the contract suite.

    Attributes:
        max_sequences: maximum number of open handles.
        max_batch_tokens: maximum tokens in one forward pass, over all spans.
        max_context: longest sequence in tokens.
        cache_tokens: total KV positions, over all sequences.
        prefill_chunk_tokens: prompt tokens that may share a step with decoding sequences without delaying them much.
        mixed_batch: spans of more than one token and spans of one token may share a forward pass.
        truncate: ``any`` length, ``bounded`` (may keep less than requested; see :class:`CutPlanner`), ``checkpoint``
            (to a state that was kept; see :mod:`enginehouse.contract.checkpoints`), or ``none`` (only to 0).
        fork: ``share`` (no copy, shared positions counted once), ``copy``, or ``none`` (returns length 0).
        batch_invariant: logits are equal to the bit for any rest of the batch and any chunks of the prompt.
        exit_layers: layer counts that ``Span.num_layers`` accepts.
        abort: ``abort()`` interrupts a running forward pass; False: it has no effect.
        sampling: names of the SamplingParams fields that the runner honours when it samples on the device, and ``mask``
            if it accepts bitmasks; not empty only for a :class:`DeviceSampler`. Core samples for all other requests.
        states: sequences can be saved and loaded; only for a :class:`StateKeeper`.
        adapters: how spans with different adapters share a pass; see :mod:`enginehouse.contract.adapters`.
        media: kinds of media in prompts; not empty only for a :class:`enginehouse.contract.media.MediaRunner`.
    """

    max_sequences: int
    max_batch_tokens: int
    max_context: int
    cache_tokens: int
    prefill_chunk_tokens: int = 256
    mixed_batch: bool = True
    truncate: Literal["any", "bounded", "checkpoint", "none"] = "any"
    fork: Literal["share", "copy", "none"] = "copy"
    batch_invariant: bool = False
    exit_layers: tuple[int, ...] = ()
    abort: bool = False
    sampling: frozenset[str] = frozenset()
    states: bool = False
    adapters: AdapterMixing = "none"
    media: tuple[MediaKind, ...] = ()


@runtime_checkable
class Runner(Protocol):
    """A loaded model that appends tokens to sequences and returns logits.

    Created, used and closed on one thread; only ``abort`` and ``tokenizer`` may be used from others. A sequence is a
    handle to KV positions; its length is the number of tokens that it holds. Invariants: after ``forward`` the length
    of each sequence has grown by the number of tokens of its span; the logits of a position depend only on the
    sequence's token ids (exactly if ``batch_invariant``, else up to rounding).

    Calls:
        open_sequence: for each choice of a request; worker, engine thread; microseconds.
        free_sequence: at its end, or when the prefix cache evicts it; worker, engine thread; microseconds.
        length: several times per step; worker, engine thread; microseconds.
        truncate: when drafts are rejected and cached prefixes are cut; worker, engine thread; microseconds.
        fork: when a cached prefix is reused, and for ``n`` choices; worker, engine thread; milliseconds.
        free_tokens: several times per step; worker, engine thread; microseconds.
        forward: once per step; worker, engine thread; the step itself, ``step_timeout_s`` at most.
        abort: when every request of a pass was cancelled; worker, reader thread, during ``forward``;
            microseconds.
        close: once; worker, engine thread; seconds.
    """

    capabilities: RunnerCapabilities
    tokenizer: Tokenizer
    info: ModelInfo

    def open_sequence(self) -> int:
        """Open a new, empty sequence. Raises CacheFull if ``max_sequences`` are open."""

    def free_sequence(self, sequence: int) -> None:
        """Free the sequence and its KV positions."""

    def length(self, sequence: int) -> int:
        """Return the number of tokens in the sequence."""

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Returns the new length: ``length`` or less (possibly 0)."""

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Open a new sequence that starts with the first ``length`` tokens of ``source``, which is not changed.

        Returns:
            The new handle, and the length that is really shared (``length`` or less, possibly 0).

        Raises:
            CacheFull: no free handle or not enough free positions.
        """

    def free_tokens(self) -> int:
        """Return the number of free KV positions. Freeing a sequence whose positions are shared may free none."""

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        """Append every span to its sequence in one pass.

        Raises:
            CacheFull: not enough free positions; nothing was changed.
            StepAborted: ``abort()`` was called; some sequences may have grown. ``lengths`` of the error gives the
                length of every sequence of the batch.
            InvalidSpan: a span violates the contract; nothing was changed.
        """

    def abort(self) -> None:
        """Request a running ``forward``, or ``encode`` of a media runner, to stop soon; best effort, any thread.

        Without one it does nothing: clear its flag when they begin.
        """

    def close(self) -> None:
        """Free everything; a second call does nothing. No other method is called afterwards."""


@runtime_checkable
class CutPlanner(Runner, Protocol):
    """A runner with ``bounded`` or ``checkpoint`` truncation that can predict the length a truncation would keep.

    It allows partial reuse of cached sequences. Without it they are reused completely or not at all: trying a
    truncation would cost a sequence each time, and one that keeps too little may lose everything.

    Calls:
        kept_length: when a cached prefix may be reused in part; worker, engine thread; microseconds.
    """

    def kept_length(self, sequence: int, length: int) -> int:
        """Return the length that ``truncate`` or ``fork`` with ``length`` would keep now; changes nothing."""


@runtime_checkable
class DeviceSampler(Runner, Protocol):
    """A runner that also samples tokens on the device; its ``forward`` accepts :class:`LastSampled` inputs.

    The next pass can thus be launched before the tokens of the previous one have reached the host. Only
    :meth:`Drawn.host` blocks.

    Calls:
        sample: once per pass, if all its requests can be sampled on the device; worker, engine thread; must not
            wait for the device.
    """

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> Drawn:
        """Draw from rows of the last forward pass; call it once, before the next ``forward``."""


@runtime_checkable
class StateKeeper(Runner, Protocol):
    """A runner whose sequences can be saved and later loaded, also in another process.

    Attributes:
        state_format: everything besides the model's own files that a saved sequence depends on: the library and its
            version, types and layout of the cache. A state is loaded only if this text is equal.

    Calls:
        save: when a sequence is written to the disk tier; worker, engine thread; milliseconds.
        load: when a saved prefix is reused; worker, engine thread; milliseconds.
    """

    state_format: str

    def save(self, sequence: int) -> memoryview:
        """Return a copy of the sequence, with its last four checkpoints before the end; it is not changed."""

    def load(self, data: memoryview) -> int:
        """Open a new sequence that continues as the saved one would have.

        The caller has verified that the data is what :meth:`save` returned. Length and header are checked again here,
        because a library may crash the process on invalid ones. Nothing is changed if this raises.

        Raises:
            CacheFull: no free handle or not enough free positions.
            StateRefused: the data is damaged, or of another model or other settings.
        """
