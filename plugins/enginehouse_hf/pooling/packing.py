"""Texts of different lengths side by side in one row, without padding.

Texts are ordered by length, so that those of equal length are neighbours: a **run**. Attention within a run is one call
over a view of the row, and code that needs a rectangle of tokens gets one without a copy. Called by the pooler; knows
token ids, not models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.pooler import PoolerInput

__all__ = ["PackedTexts", "PassAborted", "Run", "pack"]


class PassAborted(Exception):
    """``Pooler.abort`` was called during the pass."""


@frozen
class Run:
    """``count`` texts of ``length`` tokens each, from column ``begin`` of the row on."""

    begin: int
    count: int
    length: int

    @property
    def columns(self) -> slice:
        """The columns of the run."""
        return slice(self.begin, self.begin + self.count * self.length)


@define(eq=False)
class PackedTexts:
    """The tokens of one pass.

    Attributes:
        token_ids: (T,) int64, on the model's device, like the next two.
        positions: (T,) int64, counted from 0 in each text.
        types: (T,) int64 token types; None if all are 0.
        lengths: number of tokens of each text, ascending.
        prompts: number of leading tokens of each text that pooling leaves out.
        order: index, among the inputs, of each text.
        aborted: set to stop the pass before its next layer.
        masks: of sliding windows, by length and window; made by attention, for one pass.
        ends: (n + 1,) int32 ends of the texts on the device, made when a kernel needs them.
    """

    token_ids: Tensor
    positions: Tensor
    types: Tensor | None
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    order: NDArray[np.int64]
    aborted: threading.Event
    masks: dict[tuple[int, int, bool], Tensor] = field(factory=dict)
    ends: Tensor | None = None

    def runs(self, most: int | None = None) -> Iterator[Run]:
        """Yield the runs, each of at most ``most`` texts."""
        begin = 0
        for length, group in groupby(self.lengths):
            left = len(list(group))
            while left:
                count = left if most is None else min(most, left)
                yield Run(begin, count, length)
                begin, left = begin + count * length, left - count

    def check(self) -> None:
        """Raise PassAborted if the pass was aborted."""
        if self.aborted.is_set():
            raise PassAborted

    def text_ends(self) -> Tensor:
        """Return (n + 1,) int32, where the texts begin and end, from 0 on."""
        if self.ends is None:
            ends = list(accumulate(self.lengths, initial=0))
            self.ends = torch.tensor(ends, dtype=torch.int32).to(self.token_ids.device)
        return self.ends


def pack(inputs: Sequence[PoolerInput], device: torch.device, aborted: threading.Event) -> PackedTexts:
    """Order inputs by length and join them."""
    sizes = np.array([len(one.token_ids) for one in inputs])
    order = np.argsort(sizes, kind="stable")
    chosen = [inputs[index] for index in order]
    lengths = tuple(int(size) for size in sizes[order])
    token_ids = np.concatenate([one.token_ids for one in chosen]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    types = None
    if any(one.second_from is not None for one in chosen):
        starts = [
            length if one.second_from is None else one.second_from for one, length in zip(chosen, lengths, strict=True)
        ]
        types = np.concatenate([np.arange(length) >= start for length, start in zip(lengths, starts, strict=True)])
    return PackedTexts(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        types=None if types is None else torch.from_numpy(types.astype(np.int64)).to(device),
        lengths=lengths,
        prompts=tuple(one.num_prompt for one in chosen),
        order=order,
        aborted=aborted,
    )
