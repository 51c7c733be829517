"""Runner on one CUDA device: a pool of positions, decode steps as graphs, tokens drawn where the logits are.

It knows sequences, steps and logits; nothing of files (see ``opening.py``), requests or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.backend import Draw, ForwardOutput, RunnerCapabilities, Span, Tokenizer
from enginehouse.errors import EngineError
from enginehouse.types import ModelInfo
from enginehouse_hf.cuda.graphs import DecodeGraphs
from enginehouse_hf.cuda.networks import Network
from enginehouse_hf.cuda.packing import pack
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.sampling import DeviceDrawn, DeviceRows, sample
from enginehouse_hf.cuda.step import DeviceState, Step
from enginehouse_hf.depth import groups_of, row_order
from enginehouse_hf.states import check_state, pack_pieces, unpack_pieces
from enginehouse_hf.tokenizer import ModelText

__all__ = ["CudaModel", "CudaRunner"]


@frozen(eq=False)
class CudaModel:
    """A loaded model with its memory; ``attention`` names the kernel for longer spans."""

    network: Network
    state: DeviceState
    graphs: DecodeGraphs
    attention: str


class CudaRunner:
    """Implements :class:`enginehouse.backend.DeviceSampler`; ``forward`` and ``sample`` return before they are done.

    Also a :class:`enginehouse.backend.StateKeeper`: saving waits for what was launched before it.
    """

    def __init__(
        self,
        model: CudaModel,
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
        self._model: CudaModel | None = model
        self._positions = PositionPool(capabilities, info.vocab_size)

    def open_sequence(self) -> int:
        """A new, empty sequence."""
        return self._positions.open()

    def free_sequence(self, sequence: int) -> None:
        """Give the positions back that nobody shares."""
        self._positions.free(sequence)

    def length(self, sequence: int) -> int:
        """Tokens that the sequence holds."""
        return self._positions.length(sequence)

    def truncate(self, sequence: int, length: int) -> int:
        """Drop tokens from the end. Sliding-window layers keep every position, so any length is exact."""
        return self._positions.truncate(sequence, length)

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """A new sequence that shares the first ``length`` positions."""
        sequence, kept = self._positions.fork(source, length)
        table = self._loaded.state.table
        with torch.inference_mode():
            table[sequence, :kept] = table[source, :kept]
        return sequence, kept

    def save(self, sequence: int) -> memoryview:
        """A copy of all keys and values of the sequence, on the host."""
        length, state = self._positions.saved_length(sequence), self._loaded.state
        places = self._on_device(self._positions.table[sequence, :length])
        with torch.inference_mode():
            pieces = (tensor[places] for layer in state.layers for tensor in layer)
            return pack_pieces(pieces, length * state.bytes_per_token, length, self.state_format)

    def load(self, data: memoryview) -> int:
        """A new sequence with the keys and values of a saved one."""
        state = self._loaded.state
        length = check_state(data, self.state_format, state.bytes_per_token)
        sequence, places = self._positions.adopt(length)
        indices = self._on_device(places)
        tensors = [tensor for layer in state.layers for tensor in layer]
        saved = unpack_pieces(data, [((length, *tensor.shape[1:]), tensor.dtype) for tensor in tensors])
        with torch.inference_mode():
            state.table[sequence, :length] = indices.to(torch.int32)
            for tensor, kept in zip(tensors, saved, strict=True):
                tensor.index_copy_(0, indices, kept.to(tensor.device))
        return sequence

    def free_tokens(self) -> int:
        """Positions that no sequence holds."""
        return self._positions.free_tokens()

    def forward(self, spans: Sequence[Span]) -> DeviceRows:
        """Launch one pass over all spans; when that fails, no sequence has grown."""
        sizes = self._positions.check(spans)
        places = self._positions.append(spans, sizes)
        try:
            return self._launch(spans, sizes, places)
        except RuntimeError as error:  # torch's base error, out of memory included
            for span in spans:
                self._positions.truncate(span.sequence, span.start)
            raise EngineError(f"hf: the forward pass failed: {error}") from error

    def _launch(self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32]) -> DeviceRows:
        if len({span.num_layers for span in spans}) == 1:
            return DeviceRows(*self._launch_group(spans, sizes, places, spans[0].num_layers))
        groups = groups_of(spans)
        begins = [0, *accumulate(sizes)]
        parts = []
        for num_layers, group in groups.items():
            own = np.concatenate([places[begins[index] : begins[index + 1]] for index in group])
            chosen = [spans[index] for index in group], [sizes[index] for index in group]
            logits, order = self._launch_group(*chosen, own, num_layers)
            parts.append(logits.clone() if order is None else logits[torch.from_numpy(order).to(logits.device)])
        return DeviceRows(torch.cat(parts), np.array(row_order(spans, sizes, groups), np.int32))

    def _launch_group(
        self, spans: Sequence[Span], sizes: Sequence[int], places: NDArray[np.int32], num_layers: int | None
    ) -> tuple[torch.Tensor, NDArray[np.int32] | None]:
        """Logits of spans that run the same layers, and which of them each row is; None is the same order."""
        model = self._loaded
        packed = pack(spans, sizes, places, self._positions.table)
        with torch.inference_mode():
            if packed.is_plain_decode and packed.num_decodes <= model.graphs.largest:
                return model.graphs.run(packed, num_layers), packed.rows
            logits = model.network.run(Step.upload(model.state, packed, num_layers))
            return logits, packed.rows if packed.is_plain_decode else None

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> DeviceDrawn:
        """Launch the draws; see :class:`enginehouse.backend.DeviceSampler`."""
        assert isinstance(output, DeviceRows)
        with torch.inference_mode():
            return sample(output, draws, self._loaded.state.last)

    def abort(self) -> None:
        """Do nothing: what was launched cannot be stopped, and no pass is long."""

    def close(self) -> None:
        """Drop weights and KV memory; again is no error."""
        self._model = None

    def _on_device(self, places: NDArray[np.int32]) -> torch.Tensor:
        """(num_places,) int64, to index with."""
        return torch.from_numpy(places.astype(np.int64)).to(self._loaded.state.table.device)

    @property
    def _loaded(self) -> CudaModel:
        assert self._model is not None, "the runner is closed"
        return self._model
