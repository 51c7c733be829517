"""Runner on one CUDA device: pools of positions and states, decode steps as graphs, sampling on the device.

Handles sequences, steps and logits. Does not know files (see ``opening.py``), requests or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import (
    Draw,
    ForwardOutput,
    ModelSource,
    RunnerCapabilities,
    Span,
    Tokenizer,
)
from enginehouse.contract.errors import EngineError, ModelLoadError
from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse.contract.media import MAX_IMAGE_PIXELS, DecodedImage, MediaChunk, MediaInput
from enginehouse.contract.types import ModelInfo
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.lora_folder import read_invocation_tokens
from enginehouse_backendkit.media_chunks import NO_CHUNKS, Chunks
from enginehouse_backendkit.saved_states import check_head, state_body
from enginehouse_backendkit.slot_table import checked_length
from enginehouse_hf.cuda.exit_rows import ExitDrawn, ExitRows, RowGroup
from enginehouse_hf.cuda.exits import CudaExits
from enginehouse_hf.cuda.graphs import DecodeGraphs, Recorder
from enginehouse_hf.cuda.heads import PoolHeadMemory
from enginehouse_hf.cuda.image_spans import placed, run_chunk
from enginehouse_hf.cuda.networks import Network
from enginehouse_hf.cuda.packing import PackedSpans, are_short, pack, pack_by_place
from enginehouse_hf.cuda.parts import NetworkParts
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.sampling import DeviceDrawn, DeviceRows, sample
from enginehouse_hf.cuda.stacks import StackedAdapters
from enginehouse_hf.cuda.state_pools import SequenceStates, StatePools, num_rows
from enginehouse_hf.cuda.step import DeviceState, Step
from enginehouse_hf.depth import groups_by, row_order
from enginehouse_hf.heads.drafting import DraftHead, HeadDrafts, HeadLimits
from enginehouse_hf.images.held import HeldImages
from enginehouse_hf.images.reader import ImageReader
from enginehouse_hf.states import check_state, pack_lengths, pack_pieces, read_lengths, unpack_pieces

__all__ = ["CudaModel", "CudaRunner"]

_log = logging.getLogger(__name__)

_Way = int | Literal["early"] | None
"""Execution path of a span: a number of layers, the number that the policy decides, or all."""


@frozen(eq=False)
class CudaModel:
    """A loaded model with its memory.

    Attributes:
        adapters: loaded adapters.
        attention: name of the kernel for longer spans.
        slots: number of sequences that decode concurrently.
        dtype: of states between layers.
        checkpoint_bytes: maximum size of all checkpoints.
    """

    network: Network
    state: DeviceState
    graphs: DecodeGraphs
    adapters: StackedAdapters
    attention: str
    slots: int
    num_layers: int
    dtype: torch.dtype
    hidden_size: int
    checkpoint_bytes: int = 0


class CudaRunner:
    """Implements ``DeviceSampler``; ``forward`` and ``sample`` return before they are done.

    With a ``reader`` also a :class:`enginehouse.contract.media.MediaRunner`.
    Also a :class:`enginehouse.contract.backend.StateKeeper`: saving waits for previously launched work. Also a
    ``LayerAccess``: with a policy, reading the rows, or launching the next pass, waits for its decisions. Also a
    ``HeadKeeper`` and an ``AdapterKeeper``, whose adapters share every pass. With recurrent layers a
    :class:`enginehouse.contract.checkpoints.CheckpointKeeper`.

    Args:
        load_head: reads a draft head for this model.
    """

    max_image_pixels = MAX_IMAGE_PIXELS

    def __init__(
        self,
        model: CudaModel,
        capabilities: RunnerCapabilities,
        text: ModelText,
        info: ModelInfo,
        *,
        state_format: str,
        load_head: Callable[[ModelSource | None], DraftHead],
        reader: ImageReader | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.state_format = state_format
        self.tokenizer: Tokenizer = text.tokenizer
        self.info = info
        self.num_layers = model.num_layers
        self._model: CudaModel | None = model
        self._parts: NetworkParts | None = None
        self._exits: CudaExits | None = None
        self._unfinished: ExitRows | None = None
        self._load_head: Callable[[ModelSource | None], DraftHead] | None = load_head
        self._head: HeadDrafts | None = None
        self._positions = PositionPool(capabilities, info.vocab_size)
        pools = model.state.pools
        self._states = SequenceStates(pools, model.checkpoint_bytes) if pools.forms else None
        self._reader, self._images = reader, HeldImages()

    def open_sequence(self) -> int:
        """Open a new, empty sequence."""
        sequence = self._positions.open()
        if self._states is not None:
            with torch.inference_mode():
                self._states.open(sequence)
        return sequence

    def free_sequence(self, sequence: int) -> None:
        """Free the sequence and the positions that no other sequence shares."""
        self._positions.free(sequence)
        self._images.put(sequence, NO_CHUNKS)
        if self._states is not None:
            self._states.free(sequence)
        if self._head is not None:
            self._head.free(sequence)

    def length(self, sequence: int) -> int:
        """Number of tokens in the sequence."""
        return self._positions.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Sliding-window layers keep every position: without states any length is exact."""
        kept = self.kept_length(sequence, length)
        self._images.put(sequence, self._images.of(sequence).cut(kept))
        if self._states is not None:
            with torch.inference_mode():
                self._states.cut(sequence, kept, self._positions.length(sequence))
        if self._head is not None:
            self._head.cut(sequence, kept)
        return self._positions.truncate(sequence, kept)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """Create a sequence that shares the first ``length`` positions, and has a copy of the state there."""
        sequence, kept = self._positions.fork(source, self.kept_length(source, length))
        self._images.put(sequence, self._images.of(source).cut(kept))
        table = self._loaded.state.table
        with torch.inference_mode():
            table[sequence, :kept] = table[source, :kept]
            if self._states is not None:
                self._states.fork(source, sequence, kept, self._positions.length(source))
        if self._head is not None:
            self._head.share(source, sequence, kept)
        return sequence, kept

    def kept_length(self, sequence: int, length: int) -> int:
        """Implements :class:`enginehouse.contract.checkpoints.CheckpointKeeper`."""
        num_held = self._positions.length(sequence)
        kept = min(num_held, self._images.of(sequence).whole(checked_length(length)))
        return kept if self._states is None else self._states.kept_length(sequence, kept, num_held)

    def keep_checkpoint(self, sequence: int) -> None:
        """Implements :class:`enginehouse.contract.checkpoints.CheckpointKeeper`; a copy within the device's memory."""
        length = self._positions.length(sequence)
        if self._states is None:
            return
        try:
            with torch.inference_mode():
                self._states.keep(sequence, length)
        except RuntimeError as error:
            raise EngineError(f"hf: a checkpoint could not be kept: {error}") from error

    def save(self, sequence: int) -> memoryview:
        """Return a copy of states, and of all keys and values of the sequence, on the host."""
        self._finish_pass()
        length, state = self._positions.saved_length(sequence), self._loaded.state
        places = self._on_device(self._positions.table[sequence, :length])
        before, parts, num_states = self._saved_images(sequence), iter(()), 0
        with torch.inference_mode():
            if self._states is not None:
                lengths, parts = self._states.saved(sequence, length)
                before, num_states = before + pack_lengths(lengths), 1 + len(lengths)
            pieces = (tensor[places] for tensor in state.tensors)
            num_bytes = num_states * state.pools.bytes_per_state + length * state.bytes_per_token
            return pack_pieces(chain(parts, pieces), num_bytes, length, self.state_format, before)

    def load(self, data: memoryview) -> int:
        """Create a sequence with the states, keys and values of a saved one."""
        self._finish_pass()
        state, chunks, num_before, lengths = self._loaded.state, NO_CHUNKS, 0, list[int]()
        if self._reader is not None:
            chunks, num_before = Chunks.from_bytes(state_body(data), check_head(data, self.state_format))
        if self._states is not None:
            lengths, num_lengths = read_lengths(state_body(data)[num_before:], check_head(data, self.state_format))
            num_before += num_lengths
        num_states = 0 if self._states is None else 1 + len(lengths)
        num_fixed = num_before + num_states * state.pools.bytes_per_state
        length = check_state(data, self.state_format, state.bytes_per_token, num_fixed)
        sequence, places = self._positions.adopt(length)
        self._images.put(sequence, chunks)
        indices = self._on_device(places)
        tensors = state.tensors
        forms = num_states * [(form.shape, form.dtype) for form in state.pools.forms]
        forms += [((length, *tensor.shape[1:]), tensor.dtype) for tensor in tensors]
        saved = unpack_pieces(data, forms, num_before)
        with torch.inference_mode():
            if self._states is not None:
                self._states.load(sequence, lengths, saved)
            state.table[sequence, :length] = indices.to(torch.int32)
            for tensor, kept in zip(tensors, saved, strict=True):
                tensor.index_copy_(0, indices, kept.to(tensor.device))
        return sequence

    def _saved_images(self, sequence: int) -> bytes:
        return b"" if self._reader is None else self._images.of(sequence).to_bytes()

    def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Implements :class:`enginehouse.contract.media.MediaRunner`; thread-safe."""
        assert self._reader is not None, "the model takes text only"
        return self._reader.prepare(image)

    def encode(self, chunk: MediaChunk) -> torch.Tensor:
        """Return the embedding of a chunk, (num_tokens, hidden_size), in host memory; waits for the device."""
        assert self._reader is not None, "the model takes text only"
        try:
            return self._reader.encode(chunk)
        except RuntimeError as error:  # torch's base error, which includes out of memory
            raise EngineError(f"hf: an image could not be encoded: {error}") from error

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """Return the tokens that activate an adapter in PEFT's format; () for plain ones."""
        return read_invocation_tokens(path)

    def load_adapter(self, path: Path) -> int:
        """Load a LoRA from a folder in PEFT's format."""
        with torch.inference_mode():
            return self._loaded.adapters.load(path)

    def unload_adapter(self, adapter: int) -> None:
        """Free the place of an adapter."""
        self._loaded.adapters.unload(adapter)

    def free_tokens(self) -> int:
        """Number of positions not used by any sequence."""
        return self._positions.free_tokens()

    def forward(self, spans: Sequence[Span]) -> DeviceRows | ExitRows:
        """Launch one pass over all spans; if that fails, no sequence has grown."""
        sizes = self._positions.check(spans)
        for span in spans:
            self._loaded.adapters.check(span.adapter)
        media = spans[0].input  # a chunk has a pass of its own
        if isinstance(media, MediaInput):
            assert self._reader is not None, "the model takes text only"
            self._reader.check(media)
        places = self._positions.append(spans, sizes)
        try:
            if isinstance(media, MediaInput):
                rows = self._launch_chunk(spans[0], places)
            else:
                rows = self._launch(spans, sizes, places)
        except RuntimeError as error:  # torch's base error, which includes out of memory
            for span in spans:
                self._positions.truncate(span.sequence, span.start)
            raise EngineError(f"hf: the forward pass failed: {error}") from error
        if self._states is not None:
            keeps_all = self._num_verified(spans, sizes) > 0
            for span, size in zip(spans, sizes, strict=True):
                self._states.advance(span.sequence, span.start, size if keeps_all else 1)
        if isinstance(media, MediaInput):
            self._images.append(spans[0].sequence, spans[0].start, media)
        return rows

    def use_exit_policy(self, policy: BoundExitPolicy | None) -> None:
        """Implements :class:`enginehouse.contract.exit_policy.LayerAccess`; records the required graphs."""
        self._finish_pass()
        self._exits = None
        if policy is None:
            return
        if self._states is not None:
            raise ModelLoadError("some layers of this model are recurrent: a token cannot skip them")
        if not self.capabilities.exit_layers:
            raise ModelLoadError("the layers of this model are built in an unknown way")
        model = self._loaded
        with torch.inference_mode():
            if self._parts is None:
                layered, graphs = model.network.layered(), model.graphs
                like = model.state.table.new_empty(0, model.hidden_size, dtype=model.dtype)
                sizes = graphs.sizes_for(model.slots)
                self._parts = NetworkParts(layered, model.state, like, sizes, graphs.recorder)
            self._parts.prepare(policy.layers)
        self._exits = CudaExits(self._parts, policy)

    def _finish_pass(self) -> None:
        """Finish the last pass: what follows reads its keys, values and tokens, or uses the tensors of its graphs.

        If that fails, the error is raised where its rows or tokens are read.
        """
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            try:
                unfinished.finish()
            except RuntimeError as error:
                _log.warning("hf: a forward pass failed after an exit decision: %s", error)

    def open_head(self, source: ModelSource | None, *, max_tokens: int, min_probability: float) -> HeadDrafts:
        """Implements :class:`enginehouse.contract.drafter.HeadKeeper`; records the graphs again, with features."""
        model = self._loaded
        assert self._load_head is not None, "the runner is closed"
        if self._states is None and len(model.state.layers) != model.num_layers:
            raise ModelLoadError("layers of this model share keys and values; hf has no draft heads for it on a GPU")
        head = self._load_head(source)
        with torch.inference_mode():
            state = model.state if self._states is None else self._widen_states(model, 1 + max_tokens)
            memory = PoolHeadMemory(head, state, self._positions, model.num_layers, model.hidden_size, model.dtype)
            model.network.write_features(memory.writer)
            graphs = DecodeGraphs(model.network, state, model.graphs.sizes, Recorder(), lambda _share: None)
            if graphs.sizes:
                memory.record(graphs.recorder)
            memory.warm_up(self.capabilities.max_batch_tokens)
        adapters = StackedAdapters(model.network, model.dtype, graphs.change_adapters)  # none is loaded yet
        self._model = evolve(model, state=state, graphs=graphs, adapters=adapters)
        limits = HeadLimits.of(self.capabilities, self.num_layers, max_tokens, min_probability)
        self._head = HeadDrafts(head, memory, limits)
        self.state_format += f", draft head {head.identity}"
        return self._head

    def _widen_states(self, model: CudaModel, max_tokens: int) -> DeviceState:
        """Give every sequence rows for the states after ``max_tokens`` tokens of a pass; none is open yet.

        Raises:
            ModelLoadError: there is not enough device memory.
        """
        old = model.state.pools
        try:
            pools = StatePools(old.forms, old.num_slots, model.state.table.device, max_tokens)
        except torch.cuda.OutOfMemoryError as error:
            num_bytes = num_rows(old.num_slots, max_tokens) * old.bytes_per_state
            raise ModelLoadError(
                f"drafts of {max_tokens - 1} tokens need {num_bytes / 2**30:.1f} GiB for the states after each of "
                "them; lower the drafter's max_tokens, or slots, cache_tokens or memory_share"
            ) from error
        self._states = SequenceStates(pools, model.checkpoint_bytes)
        return evolve(model.state, pools=pools)

    def _launch_chunk(self, span: Span, places: NDArray[np.int32]) -> DeviceRows:
        """Run the span of an image."""
        model, reader = self._loaded, self._reader
        assert reader is not None
        self._finish_pass()
        with torch.inference_mode():
            logits = run_chunk(
                model.network, model.state, reader, self._images, span, places, self._positions.table,
                max_tokens=self.capabilities.max_batch_tokens, handles=model.adapters.handles,
            )  # fmt: skip
        return DeviceRows(logits, None)

    def _way(self, span: Span) -> _Way:
        may_exit = span.may_exit and span.num_tokens == 1 and span.num_layers is None and span.outputs != "none"
        return "early" if may_exit and not span.adapter and self._exits is not None else span.num_layers

    def _launch(self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32]) -> DeviceRows | ExitRows:
        ways = groups_by([self._way(span) for span in spans])
        if len(ways) == 1 and "early" in ways:
            self._unfinished = self._begin_early(spans, sizes, places)
            return self._unfinished
        if len(ways) == 1:
            found = self._launch_group(spans, sizes, places, next(iter(ways)))
        else:
            found = self._launch_groups(spans, sizes, places, ways)
        if self._exits is None:
            return DeviceRows(found.logits, found.order)
        rows = ExitRows(len(found.exit_layers), lambda: found, None, self._loaded.state.last)
        rows.finish()
        return rows

    def _begin_early(self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32]) -> ExitRows:
        """Launch a pass over spans of single tokens that may exit, up to the first decision."""
        exits = self._exits
        assert exits is not None
        packed = pack(spans, sizes, places, self._positions.table)
        staged = exits.stage(packed)
        self._finish_pass()
        with torch.inference_mode():
            begun = exits.begin(packed, staged)

        def finish() -> RowGroup:
            exited = exits.finish(begun)
            assert exited.logits is not None
            return RowGroup(exited.logits, packed.rows, exited.layers[packed.rows].tolist())

        logits = exits.foreseen(begun)
        foreseen = None if logits is None else DeviceRows(logits, packed.rows)
        return ExitRows(len(spans), finish, foreseen, self._loaded.state.last)

    def _launch_groups(
        self,
        spans: Sequence[Span],
        sizes: Sequence[int],
        places: NDArray[np.int32],
        ways: Mapping[_Way, list[int]],
    ) -> RowGroup:
        """Run spans, by index, that have different execution paths, one path after the other."""
        begins = [0, *accumulate(sizes)]
        parts: list[torch.Tensor] = []
        exit_layers: list[int] = []
        for way, indices in ways.items():
            own = np.concatenate([places[begins[index] : begins[index + 1]] for index in indices])
            chosen = [spans[index] for index in indices], [sizes[index] for index in indices]
            group = self._launch_group(*chosen, own, way)
            parts.append(group.in_order())
            exit_layers += group.exit_layers
        order = row_order(spans, sizes, ways)
        return RowGroup(torch.cat(parts), np.array(order, np.int32), [exit_layers[row] for row in order])

    def _launch_group(
        self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32], way: _Way
    ) -> RowGroup:
        """Run spans with the same execution path."""
        if way == "early":
            return self._begin_early(spans, sizes, places).finish()
        model = self._loaded
        packed, is_recorded = self._pack(spans, sizes, places)
        packed = placed(packed, self._images)
        self._finish_pass()
        with torch.inference_mode():
            exit_layers = [way or self.num_layers] * len(packed.rows)
            if is_recorded:
                return RowGroup(model.graphs.run(packed, way), packed.rows, exit_layers)
            logits = model.network.run(Step.upload(model.state, packed, way))
            return RowGroup(logits, packed.rows if packed.is_plain_decode else None, exit_layers)

    def _pack(self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32]) -> tuple[PackedSpans, bool]:
        """Pack spans; return True with them if a recorded step can run them."""
        model, states, table = self._loaded, self._states, self._positions.table
        if states is None:
            is_recorded = are_short(spans, sizes) and len(places) <= model.graphs.largest
            return pack(spans, sizes, places, table, None, model.adapters.handles, as_decodes=is_recorded), is_recorded
        num_verified, sequences = self._num_verified(spans, sizes), [span.sequence for span in spans]
        state_rows = states.rows(sequences, max(1, num_verified))
        if num_verified:
            dump = model.state.dump_slot, model.state.dump_place
            packed = pack_by_place(spans, sizes, places, state_rows, dump, model.adapters.handles)
        else:
            packed = pack(spans, sizes, places, table, state_rows, model.adapters.handles)
        is_single = num_verified > 0 or len(places) == len(spans)
        return packed, is_single and len(spans) <= model.graphs.largest

    def _num_verified(self, spans: Sequence[Span], sizes: Sequence[int]) -> int:
        """Return the most tokens of a span if the pass keeps recurrent states after each token, else 0."""
        most = max(sizes)
        if self._states is None or not 1 < most <= self._states.max_tokens:
            return 0
        verifies = all(size == 1 or span.outputs == "all" for span, size in zip(spans, sizes, strict=True))
        return most if verifies else 0

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> DeviceDrawn | ExitDrawn:
        """Launch the draws; see :class:`enginehouse.contract.backend.DeviceSampler`."""
        if isinstance(output, ExitRows):
            return output.draw(draws)
        assert isinstance(output, DeviceRows)
        with torch.inference_mode():
            return sample(output, draws, self._loaded.state.last)

    def abort(self) -> None:
        """Do nothing: launched work cannot be stopped, and no pass is long."""

    def close(self) -> None:
        """Release weights and KV memory. Idempotent."""
        self._model = self._parts = self._exits = self._unfinished = None
        self._states = self._head = self._load_head = self._reader = None

    def _on_device(self, places: NDArray[np.int32]) -> torch.Tensor:
        """(num_places,) int64, used as an index."""
        return torch.from_numpy(places.astype(np.int64)).to(self._loaded.state.table.device)

    @property
    def _loaded(self) -> CudaModel:
        assert self._model is not None, "the runner is closed"
        return self._model
