"""Runner over a transformers causal model: all spans of a step packed into one forward pass.

Handles sequences, slots and logits. Does not know files (see ``loader.py``), requests or sampling. This is the plain
version: eager torch, one attention call per span, float32 on the CPU by default. The fast version, for a single GPU,
is ``cuda/runner.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, RunnerCapabilities, Span, Tokenizer
from enginehouse.contract.errors import EngineError, InvalidSpan, ModelLoadError, StepAborted
from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse.contract.media import MAX_IMAGE_PIXELS, DecodedImage, MediaChunk, MediaInput
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.checkpoints import Checkpoints
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.lora_folder import read_invocation_tokens
from enginehouse_backendkit.media_chunks import NO_CHUNKS, Chunks
from enginehouse_backendkit.saved_states import check_head, state_body
from enginehouse_backendkit.slot_table import SlotTable, checked_length
from enginehouse_hf.adapters import Adapters
from enginehouse_hf.attention import ForwardAborted, KvMemory, Segment, Step
from enginehouse_hf.depth import Depths, groups_by, row_order
from enginehouse_hf.exits import EarlyExits
from enginehouse_hf.facts import ModelFacts
from enginehouse_hf.heads.drafting import DraftHead, HeadDrafts, HeadLimits
from enginehouse_hf.heads.slots import SlotHeadMemory
from enginehouse_hf.images.held import HeldImages
from enginehouse_hf.images.reader import ImageReader
from enginehouse_hf.pieces import copy_piece
from enginehouse_hf.recurrent import Mixers, SequenceState
from enginehouse_hf.states import check_state, pack_lengths, pack_pieces, read_lengths, unpack_pieces

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


def run_model(
    model: Any, step: Step, inputs: torch.Tensor, rows: list[int], positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Run one forward pass.

    Args:
        model: a transformers causal model with our attention.
        step: maps the columns of ``inputs`` to slots and places in them.
        inputs: (T,) int64 token ids, or (T, hidden_size) embeddings, on the model's device.
        rows: columns whose logits are returned, possibly none. Plain integers: accelerate would move a tensor to the
            first device of a model that is spread over several, and they are needed on the last.
        positions: (T,), or (3, T) under M-RoPE; None are the places in the slots.

    Returns:
        (num_rows, vocab_size) logits in the model's dtype.
    """
    if positions is None:
        places = [torch.arange(segment.start, segment.stop, device=inputs.device) for segment in step.segments]
        positions = torch.cat(places)
    with torch.inference_mode():
        logits: torch.Tensor = model(
            **{"input_ids" if inputs.dim() == 1 else "inputs_embeds": inputs[None]},
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=rows,
            enginehouse_step=step,
        ).logits[0]
        return logits if len(logits) == len(rows) else logits[rows]  # old model classes return every column


class HfRunner:
    """Implements :class:`enginehouse.contract.backend.StateKeeper`; a sequence is a slot of :class:`KvMemory`.

    With a ``reader`` it is a :class:`enginehouse.contract.media.MediaRunner` as well, with recurrent layers a
    :class:`enginehouse.contract.checkpoints.CheckpointKeeper`. Also a :class:`enginehouse.contract.drafter.HeadKeeper`.

    Args:
        num_checkpoints: maximum number of checkpoints over all sequences.
        load_head: reads a draft head for this model.
    """

    max_image_pixels = MAX_IMAGE_PIXELS

    def __init__(
        self,
        model: Any,
        memory: KvMemory,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
        *,
        facts: ModelFacts,
        mixers: Mixers,
        state_format: str,
        num_checkpoints: int,
        load_head: Callable[[ModelSource | None], DraftHead],
        reader: ImageReader | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.state_format = state_format
        self.tokenizer: Tokenizer = text.tokenizer
        self.info = info
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._depths: Any = Depths(model)
        self._mixers: Any = mixers
        self._facts = facts
        self._checkpoints = Checkpoints[SequenceState](num_checkpoints * facts.state_bytes)
        self._adapters: Any = Adapters(model, mixers.names)
        self._exits: EarlyExits | None = None
        self._load_head: Any = load_head
        self._head: HeadDrafts | None = None
        self._head_memory: SlotHeadMemory | None = None
        self._max_verified = 0  # tokens of a span that recurrent layers compute one by one, as drafts may be rejected
        self._memory: Any = memory
        self._device = model.device
        self._table = SlotTable(capabilities, info.vocab_size)
        self._reader: Any = reader
        self._images = HeldImages()
        self._aborted = threading.Event() if reader is None else reader.aborted

    def open_sequence(self) -> int:
        """Allocate a slot for a new, empty sequence."""
        return self._table.open()

    def free_sequence(self, sequence: int) -> None:
        """Free the slot of a sequence."""
        self._table.free(sequence)
        self._images.put(sequence, NO_CHUNKS)
        self._mixers.put(sequence, {})
        self._checkpoints.free(sequence)
        if self._head is not None:
            self._head.free(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens in the sequence."""
        return self._table.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Sliding-window layers keep every position: without states any length is exact."""
        kept = self.kept_length(sequence, length)
        self._mixers.put(sequence, self._state(sequence, kept))
        self._checkpoints.cut(sequence, kept)
        self._images.put(sequence, self._images.of(sequence).cut(kept))
        if self._head is not None:
            self._head.cut(sequence, kept)
        return self._table.truncate(sequence, kept)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Copy the first ``length`` positions into a new slot; states and checkpoints are shared."""
        kept = self.kept_length(source, length)
        state = self._state(source, kept)
        sequence, kept = self._table.fork(source, kept)
        self._memory.copy(source, sequence, kept)
        self._images.put(sequence, self._images.of(source).cut(kept))
        self._mixers.put(sequence, state)
        self._checkpoints.share(source, sequence, kept)
        if self._head is not None:
            self._head.share(source, sequence, kept)
        return sequence, kept

    def kept_length(self, sequence: int, length: int) -> int:
        """Implements :class:`enginehouse.contract.checkpoints.CheckpointKeeper`."""
        kept = min(self._table.length(sequence), self._images.of(sequence).whole(checked_length(length)))
        if kept == self._table.length(sequence) or not self._facts.states:
            return kept
        if self._mixers.state_at(sequence, kept) is not None:
            return kept
        return self._checkpoints.last_length(sequence, kept)

    def keep_checkpoint(self, sequence: int) -> None:
        """Implements :class:`enginehouse.contract.checkpoints.CheckpointKeeper`; a state is never changed in place."""
        length = self._table.length(sequence)
        if self._facts.states and length and not self._checkpoints.has(sequence, length):
            self._checkpoints.keep(sequence, length, self._mixers.state(sequence), self._facts.state_bytes)

    def _state(self, sequence: int, length: int) -> SequenceState:
        """Return the state of a sequence at a length that :meth:`kept_length` returned."""
        if length == self._table.length(sequence):
            return self._mixers.state(sequence)
        if (state := self._mixers.state_at(sequence, length)) is not None:
            return state
        return self._checkpoints.state(sequence, length) if self._facts.states and length else {}

    def save(self, sequence: int) -> memoryview:
        """Return a copy of states, keys and values of the sequence."""
        length, memory, facts = self._table.saved_length(sequence), self._memory, self._facts
        before = b"" if self._reader is None else self._images.of(sequence).to_bytes()
        states = []
        if facts.states:
            kept = self._checkpoints.saved(sequence, length)
            before += pack_lengths([length for length, _ in kept])
            states = [self._mixers.state(sequence), *(state for _, state in kept)]
        parts = (state[form.key] for state in states for form in facts.states)
        num_bytes = len(states) * facts.state_bytes + length * memory.bytes_per_token
        with torch.inference_mode():
            pieces = chain(parts, memory.pieces(sequence, length))
            return pack_pieces(pieces, num_bytes, length, self.state_format, before)

    def load(self, data: memoryview) -> int:
        """Create a sequence with the states, keys and values of a saved one."""
        facts, chunks, num_before, lengths = self._facts, NO_CHUNKS, 0, []
        if self._reader is not None:
            chunks, num_before = Chunks.from_bytes(state_body(data), check_head(data, self.state_format))
        if facts.states:
            lengths, num_lengths = read_lengths(state_body(data)[num_before:], check_head(data, self.state_format))
            num_before += num_lengths
        num_states = 1 + len(lengths) if facts.states else 0
        num_fixed = num_before + num_states * facts.state_bytes
        length = check_state(data, self.state_format, self._memory.bytes_per_token, num_fixed)
        sequence = self._table.adopt(length)
        self._images.put(sequence, chunks)
        pieces = list(self._memory.pieces(sequence, length))
        forms = num_states * [(form.shape, form.dtype) for form in facts.states]
        saved = unpack_pieces(data, forms + [(tuple(piece.shape), piece.dtype) for piece in pieces], num_before)
        with torch.inference_mode():
            states = [{form.key: next(saved).clone() for form in facts.states} for _ in range(num_states)]
            for piece, kept in zip(pieces, saved, strict=True):
                copy_piece(kept, piece)
        if facts.states:
            self._mixers.put(sequence, states[0])
        for place, state in zip(lengths, states[1:], strict=True):
            self._checkpoints.keep(sequence, place, state, facts.state_bytes)
        return sequence

    def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks that stand for an image; thread-safe."""
        prepared: Sequence[Sequence[int] | MediaChunk] = self._reader.prepare(image)
        return prepared

    def encode(self, chunk: MediaChunk) -> torch.Tensor:
        """Return the embedding of a chunk, (num_tokens, hidden_size)."""
        try:
            embedding: torch.Tensor = self._reader.encode(chunk)
        except ForwardAborted:
            raise StepAborted({}) from None
        except RuntimeError as error:  # torch's base error, which includes out of memory
            raise EngineError(f"hf: an image could not be encoded: {error}") from error
        return embedding

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """Return the tokens that activate an adapter in PEFT's format; () for plain ones."""
        return read_invocation_tokens(path)

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
        self._mixers.discard()
        media = spans[0].input  # a chunk has a pass of its own
        groups = groups_by([self._way(span) for span in spans])
        try:
            if isinstance(media, MediaInput):
                parts = [self._run_chunk(spans[0], media)]
            else:
                parts = [self._run([spans[index] for index in group], way) for way, group in groups.items()]
        except ForwardAborted:
            raise StepAborted({span.sequence: span.start for span in spans}) from None
        except RuntimeError as error:  # torch's base error, which includes out of memory
            raise EngineError(f"hf: the forward pass failed: {error}") from error
        self._table.advance(spans)
        self._mixers.commit()
        if isinstance(media, MediaInput):
            self._images.append(spans[0].sequence, spans[0].start, media)
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
            if self._facts.states:
                raise ModelLoadError("some layers of this model are recurrent: a token cannot skip them")
            raise ModelLoadError("the layers of this model are spread over devices, or built in an unknown way")
        self._exits = EarlyExits(self._depths.model(None), policy) if policy is not None else None

    def open_head(self, source: ModelSource | None, *, max_tokens: int, min_probability: float) -> HeadDrafts:
        """Implements :class:`enginehouse.contract.drafter.HeadKeeper`."""
        head = self._load_head(source)
        self._head_memory = SlotHeadMemory(head, self._depths.model(None), self._memory)
        limits = HeadLimits.of(self.capabilities, self.num_layers, max_tokens, min_probability)
        self._head = HeadDrafts(head, self._head_memory, limits)
        self._max_verified = 1 + max_tokens
        self.state_format += f", draft head {head.identity}"
        return self._head

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
        verified = (span for span in spans if span.outputs == "all" and 1 < span.num_tokens <= self._max_verified)
        self._mixers.begin(step, frozenset(span.sequence for span in verified))
        if way == "early":
            assert self._exits is not None
            exited = self._exits.run(step, token_ids)
            return exited.logits[rows], [exited.layers[row] for row in rows]
        positions = self._positions(step) if self._images.saved_positions else None
        with self._recording(step, way):
            logits = run_model(self._depths.model(way), step, token_ids, rows, positions)
        return logits, [way or self.num_layers] * len(rows)

    def _run_chunk(self, span: Span, media: MediaInput) -> tuple[torch.Tensor, list[int]]:
        """Append an image; it is divided unless its tokens attend to each other. Return no rows."""
        chunk, reader, sequence = media.chunk, self._reader, span.sequence
        embedding = reader.check(media)
        positions = reader.positions(chunk, self._images.of(sequence).position(span.start)).to(self._device)
        size = chunk.num_tokens if reader.sees_ahead else self.capabilities.max_batch_tokens
        for begin in range(0, chunk.num_tokens, size):
            end = min(begin + size, chunk.num_tokens)
            segment = Segment(sequence, span.start + begin, 0, end - begin)
            step = Step(self._memory, [segment], self._aborted, sees_ahead=reader.sees_ahead)
            self._mixers.begin(step)
            self._adapters.begin([(span.adapter, end - begin)])
            with self._recording(step, None):
                rows = run_model(self._depths.model(None), step, embedding[begin:end], [], positions[..., begin:end])
        return rows, []

    def _recording(self, step: Step, way: int | None) -> AbstractContextManager[None]:
        """Let the draft head note the states of a pass over all layers."""
        memory = self._head_memory if way is None else None
        return nullcontext() if memory is None else memory.recording(step)

    def _positions(self, step: Step) -> torch.Tensor:
        """Positions of text, (T,): fewer than the places in the slots after images under M-RoPE."""
        places = []
        for segment in step.segments:
            position = self._images.of(segment.slot).position(segment.start)
            places.append(torch.arange(position, position + segment.end - segment.begin, device=self._device))
        return torch.cat(places)

    def abort(self) -> None:
        """Stop a running forward pass, or the encoding of an image, before its next layer."""
        self._aborted.set()

    def close(self) -> None:
        """Release weights and KV memory. Idempotent."""
        self._depths = self._memory = self._exits = self._adapters = self._reader = self._mixers = None
        self._head = self._head_memory = self._load_head = None
        self._checkpoints.clear()

    def _pack(self, spans: Sequence[Span]) -> tuple[Step, torch.Tensor, list[int]]:
        """Place spans side by side, in the order that suits their adapters; rows are in the order of ``spans``."""
        segments: dict[int, Segment] = {}
        inputs: list[NDArray[np.int32]] = []
        adapters = [(span.adapter, span.num_tokens) for span in spans]
        order = self._adapters.order(adapters)
        self._adapters.begin([adapters[index] for index in order])
        end = 0
        for index in order:
            span = spans[index]
            if not isinstance(span.input, np.ndarray):
                raise InvalidSpan("this runner needs token ids")
            begin, end = end, end + len(span.input)
            segments[index] = Segment(span.sequence, span.start, begin, end)
            inputs.append(span.input)
        rows: list[int] = []
        for index, span in enumerate(spans):
            begin, end = segments[index].begin, segments[index].end
            rows += {"none": [], "last": [end - 1], "all": list(range(begin, end))}[span.outputs]
        token_ids = torch.from_numpy(np.concatenate(inputs).astype(np.int64)).to(self._device)
        step = Step(self._memory, list(segments.values()), self._aborted)
        return step, token_ids, rows
