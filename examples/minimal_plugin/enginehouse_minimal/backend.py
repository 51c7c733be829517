"""The backend ``minimal``: a text file as a language model of byte pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress, RunnerCapabilities, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.slot_table import SlotTable

__all__ = ["MinimalBackend", "MinimalOptions", "MinimalRunner"]

END = "<|end|>"


@frozen(kw_only=True)
class MinimalOptions:
    """Settings of a model: the longest sequence in tokens, and sequences that decode at once."""

    context: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    slots: int = field(default=8, validator=validators.ge(1))


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a text."""

    vocab_size = 257
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
    """Logits of one forward pass, (num_rows, vocab_size) float32."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.num_rows, self._rows = len(rows), rows

    def host(self) -> NDArray[np.float32]:
        """All of them."""
        return self._rows


class MinimalRunner:
    """Implements :class:`enginehouse.contract.backend.Runner`; ``logits`` is a row for each last byte."""

    def __init__(self, logits: NDArray[np.float32], context: int, slots: int) -> None:
        self.tokenizer = ByteTokenizer()
        self.capabilities = RunnerCapabilities(
            max_sequences=2 * slots,
            max_batch_tokens=512,
            max_context=context,
            cache_tokens=slots * context,
            batch_invariant=True,  # False if rounding depends on the batch
        )
        self.info = ModelInfo(
            backend="minimal",
            max_context=context,
            vocab_size=257,
            special_tokens=ByteTokenizer.special_tokens,
            eos_token=END,
        )
        self._logits = logits
        # It counts tokens. A model with attention also keeps keys and values for each slot, and copies them in a fork.
        table = SlotTable(self.capabilities, 257)
        self._check, self._advance = table.check, table.advance
        self.open_sequence, self.free_sequence, self.length = table.open, table.free, table.length
        self.truncate, self.fork, self.free_tokens = table.truncate, table.fork, table.free_tokens

    def forward(self, spans: Sequence[Span]) -> Rows:
        """Append the spans; what follows a byte depends on that byte alone."""
        self._check(spans)
        asked = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}
        last_bytes = np.concatenate([span.input[asked[span.outputs]] for span in spans])
        self._advance(spans)
        return Rows(self._logits[last_bytes])

    def abort(self) -> None:
        """No effect: a pass takes microseconds."""

    def close(self) -> None:
        """Nothing to free."""


class MinimalBackend:
    """Implements :class:`enginehouse.contract.backend.Backend`."""

    name = "minimal"
    api_version = 1
    options = MinimalOptions
    opens: Literal["model"] = "model"

    def probe(self) -> Probe:
        """It runs everywhere. With a library: ask ``importlib.util.find_spec``, which imports nothing."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Only files of text."""
        is_text = source.path is not None and source.path.suffix in (".txt", ".md") and source.path.is_file()
        return Match(0.1, "a file of text") if is_text else Match(0.0, "neither a .txt nor a .md file")

    def estimate(self, source: ModelSource, options: MinimalOptions) -> MemoryEstimate:
        """One row of floats for each byte."""
        return MemoryEstimate(weights_bytes=257 * 257 * 4, kv_bytes_per_token=0, total_bytes=257 * 257 * 4)

    def open(self, source: ModelSource, options: MinimalOptions, progress: Progress) -> MinimalRunner:
        """Count the pairs."""
        progress(0.0, "reading the text")
        try:
            text = Path(source.path or source.text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {source.text!r}: {error}") from error
        token_ids = [*text.encode(), 256]
        counts = np.full((257, 257), 0.01, np.float32)
        np.add.at(counts, (token_ids[:-1], token_ids[1:]), 1.0)
        progress(1.0, "ready")
        return MinimalRunner(np.log(counts), options.context or 4096, options.slots)
