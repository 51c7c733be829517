"""Runner over a transformers causal model: all spans of a step packed into one forward pass.

Handles sequences, slots and logits. Does not know files (see ``loader.py``), requests or sampling. This is the plain
version: eager torch, one attention call per span, float32 on the CPU by default. The fast version, for a single GPU,
is ``cuda/runner.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import RunnerCapabilities, Span, Tokenizer
from enginehouse.contract.errors import EngineError, InvalidSpan, ModelLoadError, StepAborted
from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.slot_table import SlotTable
from enginehouse_hf.adapters import Adapters
from enginehouse_hf.attention import ForwardAborted, KvMemory, Segment, Step
from enginehouse_hf.depth import Depths, groups_by, row_order
from enginehouse_hf.exits import EarlyExits
from enginehouse_hf.pieces import copy_piece
from enginehouse_hf.states import check_state, pack_pieces, unpack_pieces
from enginehouse_hf.tokenizer import ModelText

__all__ = ["ExitRows", "HfRunner", "LogitsRows", "run_model"]


class LogitsRows:
    """Logits of one forward pass; ``logits`` is (num_rows, vocab_size) on the model's device."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.num_rows = int(logits.shape[0])
        self._logits = logits

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable."""
        rows: NDArray[np.float32] = self._logits.to("cpu", torch.float32).numpy()
        return rows


class ExitRows(LogitsRows):
    """Logits with the number of layers that the token of each row ran through."""

    def __init__(self, logits: torch.Tensor, exit_layers: Sequence[int]) -> None:
        super().__init__(logits)
        self.exit_layers = exit_layers


def run_model(model: Any, step: Step, token_ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Run one forward pass.

    Args:
        model: a transformers causal model with our attention.
        step: maps the columns of ``token_ids`` to slots and positions.
        token_ids: (T,) int64, on the model's device.
        rows: columns whose logits are returned, possibly none. Plain integers: accelerate would move a tensor to the
            first device of a model that is spread over several, and they are needed on the last.

    Returns:
        (num_rows, vocab_size) logits in the model's dtype.
    """
    positions = torch.cat(
        [torch.arange(segment.start, segment.stop, device=token_ids.device) for segment in step.segments]
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            enginehouse_step=step,
        ).logits[0]
        return logits if len(logits) == len(rows) else logits[rows]  # old model classes return every column


class HfRunner:
    """Implements :class:`enginehouse.contract.backend.StateKeeper`; a sequence is a slot of :class:`KvMemory`."""

    def __init__(
        self,
        model: Any,
        memory: KvMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
        *,
        state_format: str,
    ) -> None:
        self.capabilities = capabilities
        self.state_format = state_format
        self.tokenizer: Tokenizer = text.tokenizer
        self.info = info
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._depths: Any = Depths(model)
        self._adapters: Any = Adapters(model)
        self._exits: EarlyExits | None = None
        self._memory: Any = memory
        self._device = model.device
        self._table = SlotTable(capabilities, info.vocab_size)
        self._aborted = threading.Event()

    def open_sequence(self) -> int:
        """Allocate a slot for a new, empty sequence."""
        return self._table.open()

    def free_sequence(self, sequence: int) -> None:
        """Free the slot of a sequence."""
        self._table.free(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens in the sequence."""
        return self._table.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Sliding-window layers keep every position, so any length is exact."""
        return self._table.truncate(sequence, length)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Copy the first ``length`` positions into a new slot."""
        sequence, kept = self._table.fork(source, length)
        self._memory.copy(source, sequence, kept)
        return sequence, kept

    def save(self, sequence: int) -> memoryview:
        """Return a copy of all keys and values of the sequence."""
        length, memory = self._table.saved_length(sequence), self._memory
        num_bytes = length * memory.bytes_per_token
        with torch.inference_mode():
            return pack_pieces(memory.pieces(sequence, length), num_bytes, length, self.state_format)

    def load(self, data: memoryview) -> int:
        """Create a sequence with the keys and values of a saved one."""
        length = check_state(data, self.state_format, self._memory.bytes_per_token)
        sequence = self._table.adopt(length)
        pieces = list(self._memory.pieces(sequence, length))
        saved = unpack_pieces(data, [(tuple(piece.shape), piece.dtype) for piece in pieces])
        with torch.inference_mode():
            for piece, kept in zip(pieces, saved, strict=True):
                copy_piece(kept, piece)
        return sequence

    def load_adapter(self, path: Path) -> int:
        """Load a LoRA from a folder in PEFT's format."""
        return int(self._adapters.load(path))

    def unload_adapter(self, adapter: int) -> None:
        """Free an adapter."""
        self._adapters.unload(adapter)

    def free_tokens(self) -> int:
        """Number of positions not used by any sequence."""
        return self._table.free_tokens()

    def forward(self, spans: Sequence[Span]) -> LogitsRows:
        """Append all spans in one pass; if it is aborted or fails, no sequence has grown."""
        sizes = self._table.check(spans)
        for span in spans:
            self._adapters.check(span.adapter)
        self._aborted.clear()
        groups = groups_by([self._way(span) for span in spans])
        try:
            parts = [self._run([spans[index] for index in group], way) for way, group in groups.items()]
        except ForwardAborted:
            raise StepAborted({span.sequence: span.start for span in spans}) from None
        except RuntimeError as error:  # torch's base error, which includes out of memory
            raise EngineError(f"hf: the forward pass failed: {error}") from error
        self._table.advance(spans)
        logits, exit_layers = parts[0]
        if len(parts) > 1:
            order = row_order(spans, sizes, groups)
            logits = torch.cat([logits for logits, _ in parts])[order]
            unordered = [layer for _, layers in parts for layer in layers]
            exit_layers = [unordered[row] for row in order]
        return LogitsRows(logits) if self._exits is None else ExitRows(logits, exit_layers)

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """Implements :class:`enginehouse.contract.exit_policy.LayerAccess`."""
        if policy is not None and not self.capabilities.exit_layers:
            raise ModelLoadError("the layers of this model are spread over devices, or built in an unknown way")
        self._exits = EarlyExits(self._depths.model(None), policy) if policy is not None else None

    def _way(self, span: Span) -> int | Literal["early"] | None:
        """Return the execution path of a span: number of layers, None for all, or ``early``."""
        if (
            self._exits is not None
            and span.may_exit
            and not span.adapter
            and span.num_layers is None
            and span.num_tokens == 1
        ):
            return "early"
        return span.num_layers

    def _run(self, spans: Sequence[Span], way: int | Literal["early"] | None) -> tuple[torch.Tensor, list[int]]:
        """Return logits (num_rows, vocab_size), and the number of layers that each row ran through."""
        step, token_ids, rows = self._pack(spans)
        self._adapters.begin(spans)
        if way == "early":
            assert self._exits is not None
            exited = self._exits.run(step, token_ids)
            return exited.logits[rows], [exited.layers[row] for row in rows]
        return run_model(self._depths.model(way), step, token_ids, rows), [way or self.num_layers] * len(rows)

    def abort(self) -> None:
        """Stop a running forward pass before its next layer."""
        self._aborted.set()

    def close(self) -> None:
        """Release weights and KV memory. Idempotent."""
        self._depths = self._memory = self._exits = self._adapters = None

    def _pack(self, spans: Sequence[Span]) -> tuple[Step, torch.Tensor, list[int]]:
        segments: list[Segment] = []
        rows: list[int] = []
        inputs: list[NDArray[np.int32]] = []
        end = 0
        for span in spans:
            if not isinstance(span.input, np.ndarray):
                raise InvalidSpan("this runner needs token ids")
            begin, end = end, end + len(span.input)
            segments.append(Segment(span.sequence, span.start, begin, end))
            inputs.append(span.input)
            rows += {"none": [], "last": [end - 1], "all": list(range(begin, end))}[span.outputs]
        token_ids = torch.from_numpy(np.concatenate(inputs).astype(np.int64)).to(self._device)
        step = Step(self._memory, segments, self._aborted)
        return step, token_ids, rows
