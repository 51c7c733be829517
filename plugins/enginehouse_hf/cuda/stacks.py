"""The loaded adapters of a model on the device: stacks of their halves, whose memory the recorded steps read.

An adapter has an index in every stack. A stack exists for each projection that an adapter has changed so far; stacks
grow when an adapter has more ranks than fit, when all indices are taken, or when it changes another projection. Called
by the runner between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan
from enginehouse_hf.adapters import Halves, LayerForm, read_peft_folder
from enginehouse_hf.cuda.lora import Stack
from enginehouse_hf.cuda.networks import Adaptable, Network

__all__ = ["StackedAdapters"]

_FIRST_ADAPTERS, _FIRST_RANK = 4, 16


class StackedAdapters:
    """The adapters of one network.

    Args:
        network: reads the stacks.
        dtype: of its states.
        on_change: called with the number of adapters that fit when the memory of the stacks has changed.
    """

    def __init__(self, network: Network, dtype: torch.dtype, on_change: Callable[[int], None]) -> None:
        self._network, self._dtype, self._on_change = network, dtype, on_change
        self._rank = 0
        self._next = 1
        self.handles: list[int] = []
        """The adapter at each index; 0 is none."""

    def load(self, path: Path) -> int:
        """Load a folder in PEFT's format; return its handle.

        Raises:
            AdapterRefused: the files do not fit the model, or their weights the memory of the device.
        """
        adaptable = self._network.adaptable()
        halves = read_peft_folder(path, self._forms(adaptable))
        try:
            self._make_room(adaptable, halves)
        except torch.OutOfMemoryError as error:
            raise AdapterRefused(
                f"{path.name}: there is no memory for it on the device beside the model; lower memory_share or "
                "cache_tokens",
                "adapters",
            ) from error
        index = self.handles.index(0)
        for part, stack in self._network.stacks.items():
            _fill(stack, index, [halves.get(name) for name, _ in adaptable[part].modules])
        self.handles[index], self._next = self._next, self._next + 1
        return self.handles[index]

    def unload(self, adapter: int) -> None:
        """Free the index of an adapter."""
        self.handles[self.handles.index(adapter)] = 0

    def check(self, adapters: AdapterSet) -> None:
        """Raise InvalidSpan if one of a set is not loaded."""
        for handle, _ in adapters:
            if handle not in self.handles or handle == 0:
                raise InvalidSpan(f"adapter {handle} is not loaded")

    def _forms(self, adaptable: Mapping[object, Adaptable]) -> dict[str, LayerForm]:
        host = torch.device("cpu")
        return {
            name: LayerForm(num_rows, part.width, host, self._dtype)
            for part in adaptable.values()
            for name, num_rows in part.modules
        }

    def _make_room(self, adaptable: Mapping[object, Adaptable], halves: Mapping[str, Halves]) -> None:
        """Let the stacks grow until the adapter fits; if memory does not suffice, nothing has changed."""
        stacks = self._network.stacks
        wanted = {part for part, one in adaptable.items() if any(name in halves for name, _ in one.modules)}
        largest = max(len(one.a) for one in halves.values())
        rank = max(self._rank, _FIRST_RANK, 1 << (largest - 1).bit_length())
        num_adapters = len(self.handles) if 0 in self.handles else max(_FIRST_ADAPTERS, 2 * len(self.handles))
        if rank == self._rank and num_adapters == len(self.handles) and wanted <= stacks.keys():
            return
        grown = {part: _empty(adaptable[part], num_adapters, rank, self._dtype) for part in {*stacks, *wanted}}
        for part, stack in stacks.items():
            _copy(stack, grown[part])
        stacks.clear()
        stacks.update(grown)
        self._rank = rank
        self.handles += [0] * (num_adapters - len(self.handles))
        self._on_change(num_adapters)


def _empty(part: Adaptable, num_adapters: int, rank: int, dtype: torch.dtype) -> Stack:
    rows = tuple(num_rows for _, num_rows in part.modules)
    a = torch.zeros(len(rows) * num_adapters * rank, part.width, dtype=dtype, device=part.device)
    b = torch.zeros(sum(rows), num_adapters * rank, dtype=dtype, device=part.device)
    return Stack(a, b, rows, num_adapters, rank)


def _views(stack: Stack) -> tuple[Tensor, Tensor]:
    """(num_parts, num_adapters, rank, inputs) and (outputs, num_adapters, rank)."""
    sizes = stack.num_adapters, stack.rank
    return stack.a.view(len(stack.rows), *sizes, -1), stack.b.view(-1, *sizes)


def _copy(source: Stack, target: Stack) -> None:
    """Copy all adapters into the first ones of a stack that is not smaller."""
    for old, new in zip(_views(source), _views(target), strict=True):
        new[:, : source.num_adapters, : source.rank].copy_(old)


def _fill(stack: Stack, index: int, parts: list[Halves | None]) -> None:
    """Write an adapter, part by part; None does not change that part."""
    a, b = _views(stack)
    a[:, index].zero_()
    b[:, index].zero_()
    begin = 0
    for part, (halves, num_rows) in enumerate(zip(parts, stack.rows, strict=True)):
        if halves is not None:
            rank = len(halves.a)
            a[part, index, :rank].copy_(halves.a)
            b[begin : begin + num_rows, index, :rank].copy_(halves.b)
        begin += num_rows
