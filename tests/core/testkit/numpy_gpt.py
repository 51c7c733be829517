"""A backend of the test kit's own tests: a transformer of two layers in numpy that keeps keys and values per slot.

The suites pass on it. ``mutants`` derives wrong backends from it, each with one mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, RunnerCapabilities, Span
from enginehouse.contract.errors import ModelLoadError, StepAborted
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.slot_table import SlotTable

END = "<|end|>"
VOCAB_SIZE = 257
NUM_LAYERS, WIDTH = 2, 16

Array = NDArray[np.float32]


@frozen(kw_only=True)
class GptOptions:
    """Settings of a model."""

    context: int | None = field(default=96, validator=validators.optional(validators.ge(2)))
    slots: int = field(default=4, validator=validators.ge(1))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text."""

    vocab_size = VOCAB_SIZE
    token_bytes = (*(bytes([value]) for value in range(256)), END.encode())
    special_tokens = {END: 256}
    control_token_ids = end_token_ids = frozenset({256})
    prefix_token_ids = ()
    max_bytes_per_token = len(END)

    def encode(self, text: str, special: bool) -> list[int]:
        """Bytes of the text; its control tokens only with ``special``."""
        first, *others = text.split(END) if special else [text]
        return list(first.encode()) + [token_id for part in others for token_id in (256, *part.encode())]


class Rows:
    """Logits of one pass, (num_rows, vocab_size) float32."""

    def __init__(self, rows: Array) -> None:
        self.num_rows, self._rows = len(rows), rows

    def host(self) -> Array:
        """All rows."""
        return self._rows


class GptRunner:
    """Implements :class:`enginehouse.contract.backend.Runner`."""

    asked: dict[str, slice] = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}

    def __init__(self, options: GptOptions) -> None:
        context, slots = options.context or 96, options.slots
        self.tokenizer = ByteTokenizer()
        self.capabilities = RunnerCapabilities(
            max_sequences=2 * slots, max_batch_tokens=64, max_context=context, cache_tokens=slots * context, abort=True
        )
        self.info = ModelInfo(
            backend="gpt", max_context=context, vocab_size=VOCAB_SIZE, special_tokens={END: 256}, eos_token=END
        )
        random = np.random.default_rng(5)

        def matrix(*shape: int) -> Array:
            return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

        self.embedding, self.positions = 2 * matrix(VOCAB_SIZE, WIDTH), 2 * matrix(context, WIDTH)
        self.layers = [[matrix(WIDTH, WIDTH) for _ in range(4)] for _ in range(NUM_LAYERS)]
        # (num_layers, max_sequences, context, width)
        self.keys, self.values = np.zeros((2, NUM_LAYERS, 2 * slots, context, WIDTH), np.float32)
        self.table = SlotTable(self.capabilities, VOCAB_SIZE)
        self.open_sequence, self.free_sequence, self.length = self.table.open, self.table.free, self.table.length
        self.truncate, self.free_tokens = self.table.truncate, self.table.free_tokens
        self.aborted = threading.Event()

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Copy the keys and values."""
        copy, kept = self.table.fork(source, length)
        for memory in (self.keys, self.values):
            memory[:, self.slot(copy), :kept] = memory[:, self.slot(source), :kept]
        return copy, kept

    def forward(self, spans: Sequence[Span]) -> Any:
        """Run the spans one after another."""
        self.check(spans)
        rows = [np.empty((0, VOCAB_SIZE), np.float32)]
        for span in spans:
            hidden = self.run(span, spans)
            self.advance(span)
            rows.append(hidden[self.asked[span.outputs]] @ self.embedding.T)
        return self.output(np.concatenate(rows), len(spans))

    def check(self, spans: Sequence[Span]) -> None:
        """Refuse a wrong batch before anything changes."""
        self.table.check(spans)

    def advance(self, span: Span) -> None:
        """Record the tokens of a span."""
        self.table.advance([span])

    def output(self, rows: Array, num_spans: int) -> Any:
        """The result of a pass."""
        return Rows(rows)

    def slot(self, sequence: int) -> int:
        """Index of the memory of a sequence."""
        return sequence

    def places(self, span: Span, num_tokens: int) -> NDArray[np.int64]:
        """(num_tokens,) positions of the tokens."""
        return np.arange(span.start, span.start + num_tokens)

    def sees(self, span: Span, num_tokens: int) -> NDArray[np.bool_]:
        """(num_tokens, end) True where a token attends to a position."""
        end = span.start + num_tokens
        return np.arange(end) <= np.arange(span.start, end)[:, None]

    def run(self, span: Span, spans: Sequence[Span]) -> Array:
        """(num_tokens, width) hidden states; writes keys and values."""
        token_ids: Any = span.input
        slot, end = self.slot(span.sequence), span.start + len(token_ids)
        hidden = self.embedding[token_ids] + self.positions[self.places(span, len(token_ids))]
        for layer, (query, key, value, mixed) in enumerate(self.layers):
            self.look_for_abort(spans)
            self.keys[layer, slot, span.start : end] = hidden @ key
            self.values[layer, slot, span.start : end] = hidden @ value
            scores = (hidden @ query) @ self.keys[layer, slot, :end].T / np.sqrt(np.float32(WIDTH))
            scores = np.where(self.sees(span, len(token_ids)), scores, np.float32(-1e9))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            hidden = hidden + np.tanh(weights @ self.values[layer, slot, :end] @ mixed)
        return hidden

    def look_for_abort(self, spans: Sequence[Span]) -> None:
        """End the pass if another thread asked for it."""
        if self.aborted.is_set():
            self.aborted.clear()
            raise StepAborted(self.lengths(spans))

    def lengths(self, spans: Sequence[Span]) -> dict[int, int]:
        """Lengths of the sequences of a batch."""
        return {span.sequence: self.length(span.sequence) for span in spans}

    def abort(self) -> None:
        """End the running pass."""
        self.aborted.set()

    def close(self) -> None:
        """Nothing to free."""


class GptBackend:
    """Implements :class:`enginehouse.contract.backend.Backend`."""

    name = "gpt"
    api_version = 1
    options = GptOptions
    opens: Literal["model"] = "model"
    runner: type[GptRunner] = GptRunner

    def probe(self) -> Probe:
        """It runs everywhere."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Files ending in .gpt."""
        is_ours = source.path is not None and source.path.suffix == ".gpt" and source.path.is_file()
        return Match(0.9, "a .gpt file") if is_ours else Match(0.0, "not a .gpt file")

    def estimate(self, source: ModelSource, options: GptOptions) -> MemoryEstimate:
        """Keys and values of two layers."""
        per_token = 2 * NUM_LAYERS * WIDTH * 4
        return MemoryEstimate(20_000, per_token, 20_000 + per_token * (options.context or 96) * options.slots)

    def read(self, source: ModelSource) -> bytes:
        """The file, which holds one word."""
        assert source.path is not None
        return source.path.read_bytes()

    def open(self, source: ModelSource, options: GptOptions, progress: Progress) -> GptRunner:
        """Make the weights."""
        progress(0.0, "reading")
        try:
            data = self.read(source)
        except OSError as error:
            raise ModelLoadError(f"cannot read {source.text}: {error}") from error
        if data != b"gpt":
            raise ModelLoadError(f"{source.text} is not a model")
        progress(1.0, "ready")
        return self.runner(options)


class CountsNoContext(GptBackend):
    """A wrong one: a longer context costs nothing, and a source that is missing ends its estimate with a raw error."""

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        """Size of the file."""
        return MemoryEstimate(len(self.read(source)), 64, 20_000)


class RaisesRawErrors(GptBackend):
    """A wrong one: errors of reading are not load errors. In this module, so that another process can import it."""

    def open(self, source: ModelSource, options: Any, progress: Progress) -> GptRunner:
        """Read without a border."""
        self.read(source)
        return super().open(source, options, progress)
