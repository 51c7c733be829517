"""Parts of decode steps as CUDA graphs: some layers, only the keys of the rest, the head; for early exit.

The parts of one batch size share one step and one pair of states, so that a part continues where the previous one ended
and nothing is copied between them. A graph is recorded for each part and size when a policy first needs it, like
``graphs.py`` does for whole steps; where recording is impossible, parts are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from attrs import define, frozen
from torch import Tensor

from enginehouse_hf.cuda.graphs import Recorder
from enginehouse_hf.cuda.layered import LayeredNetwork, States
from enginehouse_hf.cuda.packing import PackedSpans, flatten
from enginehouse_hf.cuda.step import DeviceState, Step, padded_decodes

__all__ = ["NetworkParts", "TokenBatch"]

_log = logging.getLogger(__name__)


@frozen
class _Layers:
    """From the states, or token ids, before layer ``begin`` to the states after layer ``end``."""

    begin: int
    end: int


@frozen
class _Keys:
    """Computes keys and values of the states in all layers from ``begin`` on."""

    begin: int


@frozen
class _Head:
    """Computes the logits of the states."""


_Part = _Layers | _Keys | _Head


@define(eq=False)
class TokenBatch:
    """Single tokens moving through the layers, padded to a size that has graphs.

    Attributes:
        num_tokens: number of rows that are not padding.
        numbers: input of the step.
        idle: input of a step that accesses only the dumps.
    """

    size: int
    step: Step
    numbers: Tensor
    idle: Tensor
    states: States
    num_tokens: int = 0

    @property
    def hidden(self) -> Tensor:
        """(num_tokens, hidden_size), states after the last layer that ran."""
        return self.states.hidden[: self.num_tokens]

    @property
    def before(self) -> Tensor:
        """(num_tokens, hidden_size), states before that layer."""
        return self.states.before[: self.num_tokens]


class NetworkParts:
    """The parts of one model.

    Args:
        network: the network to run.
        state: the pool.
        like: (0, hidden_size), in the type of the states between layers.
        sizes: batch sizes that get graphs, ascending; larger batches are launched kernel by kernel.
        recorder: records the graphs.
    """

    def __init__(
        self, network: LayeredNetwork, state: DeviceState, like: Tensor, sizes: Sequence[int], recorder: Recorder
    ) -> None:
        self.num_layers = network.num_layers
        self._network, self._state, self._like = network, state, like
        self._sizes, self._recorder = list(sizes), recorder
        self._batches: dict[int, TokenBatch] = {}
        self._recorded: dict[tuple[_Part, int], Callable[[], Tensor | None]] = {}

    def prepare(self, layers: Sequence[int]) -> None:
        """Record the parts for tokens that may exit after ``layers``, ascending; no step may be in flight."""
        bounds = [0, *layers, self.num_layers]
        # The head first: later recordings do not use the memory of its logits, and keys are written after them.
        parts: list[_Part] = [_Head(), *(_Layers(begin, end) for begin, end in pairwise(bounds)), *map(_Keys, layers)]
        for size in reversed(self._sizes):
            for part in parts:
                if (part, size) not in self._recorded:
                    self._recorded[part, size] = self._record(part, self._batch(size))

    def stage(self, packed: PackedSpans) -> Tensor:
        """Return the input of a batch of plain decodes, in pinned memory; the previous batch goes on."""
        array, _ = flatten(padded_decodes(self._state, packed, self._size_of(packed)))
        return torch.from_numpy(array).pin_memory()

    def load(self, packed: PackedSpans, hidden: Tensor | None = None, staged: Tensor | None = None) -> TokenBatch:
        """Load plain decodes; ends the previous batch.

        Args:
            hidden: known states, (num_decodes, hidden_size).
            staged: the result of :meth:`stage`.
        """
        batch = self._batch(self._size_of(packed))
        batch.numbers.copy_(self.stage(packed) if staged is None else staged, non_blocking=True)
        batch.num_tokens = packed.num_decodes
        if hidden is not None:
            batch.hidden.copy_(hidden)
        return batch

    def run_layers(self, batch: TokenBatch, begin: int, end: int) -> None:
        """Run the batch from before layer ``begin`` to after layer ``end``."""
        self._run(_Layers(begin, end), batch)

    def write_keys(self, batch: TokenBatch, begin: int) -> None:
        """Write keys and values of the batch in all layers from ``begin`` on."""
        self._run(_Keys(begin), batch)

    def logits(self, batch: TokenBatch) -> Tensor:
        """(num_tokens, vocab_size) of the current batch; valid until a part other than its keys runs."""
        logits = self._run(_Head(), batch)
        assert logits is not None
        return logits[: batch.num_tokens]

    def _size_of(self, packed: PackedSpans) -> int:
        """Return the size to which a batch is padded."""
        place = bisect_left(self._sizes, packed.num_decodes)
        return self._sizes[place] if place < len(self._sizes) else packed.num_decodes

    def _batch(self, size: int) -> TokenBatch:
        if size not in self._batches:
            step, numbers = Step.static(self._state, size)
            states = States(*(self._like.new_zeros(size, self._like.shape[1]) for _ in range(2)))
            self._batches[size] = TokenBatch(size, step, numbers, numbers.clone(), states)
        return self._batches[size]

    def _run(self, part: _Part, batch: TokenBatch) -> Tensor | None:
        return self._recorded.get((part, batch.size), partial(self._compute, part, batch))()

    def _compute(self, part: _Part, batch: TokenBatch) -> Tensor | None:
        match part:
            case _Layers(begin=begin, end=end):
                self._network.run_layers(batch.step, batch.states, begin, end)
            case _Keys(begin=begin):
                self._network.write_keys(batch.step, batch.states.hidden, begin)
            case _Head():
                return self._network.head(batch.states.hidden)
        return None

    def _record(self, part: _Part, batch: TokenBatch) -> Callable[[], Tensor | None]:
        """Return a graph of the part, tested on the dumps only; if it cannot be recorded, the function itself."""
        batch.numbers.copy_(batch.idle)
        compute = partial(self._compute, part, batch)
        try:
            graph, result = self._recorder.record(compute)
        except RuntimeError as error:
            _log.warning("hf: parts of decode steps cannot be recorded and are launched kernel by kernel: %s", error)
            torch.cuda.synchronize()
            return compute

        def replay() -> Tensor | None:
            graph.replay()
            return result

        return replay
