"""Decode steps as CUDA graphs: launched with one call, for certain batch sizes; smaller batches are padded.

Called by the runner. A graph is recorded once per size: while the model loads, or on first use for fewer layers, with
adapters, and for steps that only drafts make: of more tokens than sequences that decode at once, or with recurrent
layers of several tokens for each sequence. Its inputs are static tensors that each replay reads.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from attrs import frozen
from torch import Tensor

from enginehouse.process import no_collection
from enginehouse_hf.cuda.compiling import compile_together
from enginehouse_hf.cuda.networks import Network
from enginehouse_hf.cuda.packing import PackedSpans, flatten
from enginehouse_hf.cuda.step import DeviceState, Step, padded_decodes

__all__ = ["DecodeGraphs", "Recorder", "graph_sizes"]

_log = logging.getLogger(__name__)

_TILES = (1, 8, 16, 32, 64, 128)
"""Numbers of tokens for which kernels of adapters differ."""

_Result = TypeVar("_Result")


def graph_sizes(largest: int, above: int = 0) -> list[int]:
    """Batch sizes that get a graph: closely spaced for short steps, otherwise at most a quarter apart.

    Args:
        largest: the last of them.
        above: only sizes beyond this one.
    """
    sizes = {1, 2, 4, 8, *range(16, min(largest, 128) + 1, 16), *range(160, largest + 1, 32), largest}
    return sorted(size for size in sizes if above < size <= largest)


class Recorder:
    """Records graphs of work on the device. They run one at a time, so all share the memory of intermediate results."""

    def __init__(self) -> None:
        self._memory: object = None

    def record(self, work: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """Return the graph, and the result of ``work``: tensors that each replay fills.

        Raises:
            RuntimeError: the work reads values on the host in between.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and initialises libraries outside of the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other graphs, which may be garbage, cannot be destroyed during a recording.
        with no_collection(), torch.cuda.graph(graph, pool=self._memory):  # type: ignore[arg-type]
            result = work()
        self._memory = graph.pool()
        return graph, result


@frozen(eq=False)
class _Recorded:
    """A graph with its input and output tensors, whose addresses are fixed: ``step`` holds the token ids."""

    graph: torch.cuda.CUDAGraph
    step: Step
    numbers: Tensor
    logits: Tensor


class DecodeGraphs:
    """Recorded decode steps.

    Args:
        network: the network to record.
        state: the pool.
        sizes: batch sizes, ascending.
        recorder: records the graphs.
        progress: called with the completed share before each recording.
        later: larger batch sizes, ascending, recorded on first use.
    """

    def __init__(
        self,
        network: Network,
        state: DeviceState,
        sizes: list[int],
        recorder: Recorder,
        progress: Callable[[float], None],
        later: Sequence[int] = (),
    ) -> None:
        self._network, self._state, self.recorder = network, state, recorder
        self.sizes = [*sizes, *later] if sizes else []
        self._num_adapters = 0
        self._graphs: dict[tuple[int, int | None, bool, int], _Recorded] = {}
        # The largest first: the smaller ones then reuse its memory.
        for done, size in enumerate(reversed(sizes)):
            progress(done / len(sizes))
            self._record(size, None, False, 1)

    def change_adapters(self, num_adapters: int) -> None:
        """Drop the graphs with adapters, whose memory has changed, and compile their kernels; no step is in flight.

        Args:
            num_adapters: number that fit into the stacks.
        """
        torch.cuda.synchronize()
        self._num_adapters = num_adapters
        self._graphs = {key: recorded for key, recorded in self._graphs.items() if not key[2]}
        steps = [Step.static(self._state, size, num_adapters=num_adapters)[0] for size in _TILES]
        works = [partial(self._network.run, step) for step in steps]
        compile_together(works, self._state.table.device)
        for work in works:
            work()

    @property
    def largest(self) -> int:
        """The most sequences, or single tokens, that can be run."""
        return self.sizes[-1] if self.sizes else 0

    def sizes_for(self, num_decodes: int) -> list[int]:
        """Return the sizes to which batches of up to ``num_decodes`` tokens are padded."""
        return self.sizes[: bisect_left(self.sizes, num_decodes) + 1]

    def run(self, packed: PackedSpans, num_layers: int | None = None) -> Tensor:
        """(num_decodes, vocab_size) logits of plain decodes, valid until the next run."""
        span_tokens = packed.span_tokens
        num_sequences = packed.num_decodes // span_tokens
        size = self.sizes[bisect_left(self.sizes, num_sequences)]
        key = size, num_layers, len(packed.scales) > 0, span_tokens
        if key not in self._graphs:
            started = time.perf_counter()
            self._record(*key)
            seconds = time.perf_counter() - started
            num_tokens = size * span_tokens
            _log.info(
                "hf: a step of %d tokens (layers: %s) recorded in %.2f s", num_tokens, num_layers or "all", seconds
            )
        recorded = self._graphs[key]
        array, _ = flatten(padded_decodes(self._state, packed, size))
        recorded.numbers.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        recorded.graph.replay()
        if span_tokens == 1 or size == num_sequences:
            return recorded.logits[: packed.num_decodes]
        return recorded.logits.view(span_tokens, size, -1)[:, :num_sequences].flatten(0, 1)

    def _record(self, size: int, num_layers: int | None, adapts: bool, span_tokens: int) -> None:
        """Record a graph; it reads and writes only the dumps meanwhile, so this may happen between steps."""
        step, numbers = Step.static(self._state, size, num_layers, self._num_adapters if adapts else 0, span_tokens)
        graph, logits = self.recorder.record(lambda: self._network.run(step))
        self._graphs[size, num_layers, adapts, span_tokens] = _Recorded(graph, step, numbers, logits)
