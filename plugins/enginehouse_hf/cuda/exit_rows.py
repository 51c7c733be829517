"""Rows of logits of a pass in which tokens may exit early, and the tokens drawn from them.

The decisions of the policy come from the device, so such a pass is finished only when its rows or tokens are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Draw, Sampled
from enginehouse.contract.errors import EngineError
from enginehouse_hf.cuda.sampling import DeviceDrawn, DeviceRows, sample

__all__ = ["ExitDrawn", "ExitRows", "RowGroup"]


@frozen(eq=False)
class RowGroup:
    """Result of the spans with the same execution path.

    Attributes:
        logits: (num_rows, vocab_size).
        order: index into ``logits`` of each row; None is the identity.
        exit_layers: number of layers that each row ran through.
    """

    logits: torch.Tensor
    order: NDArray[np.int32] | None
    exit_layers: list[int]

    def in_order(self) -> torch.Tensor:
        """(num_rows, vocab_size), row by row; a copy that outlives the next group."""
        if self.order is None:
            return self.logits.clone()
        return self.logits[torch.from_numpy(self.order).to(self.logits.device)]


class ExitRows:
    """Rows of a pass in which tokens may exit, and the tokens drawn from them. Implements ``ExitOutput``.

    The pass is finished, and its tokens are drawn, when one of them is needed: to read it, or for the next pass.

    Args:
        finish: runs the pass to its end.
        foreseen: the rows that it probably ends with, if they are known; tokens are drawn from them at once.
        last: the last token drawn for each sequence.
    """

    def __init__(
        self, num_rows: int, finish: Callable[[], RowGroup], foreseen: DeviceRows | None, last: torch.Tensor
    ) -> None:
        self.num_rows = num_rows
        self._finish: Callable[[], RowGroup] | None = finish
        self._foreseen, self._last = foreseen, last
        self._group: RowGroup | None = None
        self._draws: Sequence[Draw] = ()
        self._drawn: DeviceDrawn | None = None

    def finish(self) -> RowGroup:
        """Run the pass to its end; waits for the decisions of the policy."""
        if self._finish is not None:
            finish, self._finish = self._finish, None  # after an error it is not run again
            with torch.inference_mode():
                self._group = finish()
                is_foreseen = self._foreseen is not None and self._foreseen.logits is self._group.logits
                if self._draws and not is_foreseen:
                    self._drawn = sample(self.rows(), self._draws, self._last)
        if self._group is None:
            raise EngineError("hf: the forward pass failed after an exit decision")
        return self._group

    def draw(self, draws: Sequence[Draw]) -> ExitDrawn:
        """Draw tokens at the end of the pass."""
        self._draws = draws
        rows = self.rows() if self._group is not None else self._foreseen
        if rows is not None:
            with torch.inference_mode():
                self._drawn = sample(rows, draws, self._last)
        return ExitDrawn(self)

    def drawn(self) -> DeviceDrawn:
        """Return the tokens, on their way to the host."""
        self.finish()
        assert self._drawn is not None, "nothing was drawn"
        return self._drawn

    @property
    def exit_layers(self) -> Sequence[int]:
        """Number of layers that the token of each row ran through."""
        return self.finish().exit_layers

    def rows(self) -> DeviceRows:
        """Return the rows on the device."""
        group = self.finish()
        return DeviceRows(group.logits, group.order)

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable."""
        return self.rows().host()

    def select(self, rows: Sequence[int]) -> DeviceRows:
        """Select rows."""
        return self.rows().select(rows)


@frozen(eq=False)
class ExitDrawn:
    """Tokens that are drawn when their pass is finished."""

    _rows: ExitRows

    def host(self) -> Sequence[Sampled]:
        """Finish the pass, and wait for the tokens; one per draw."""
        return self._rows.drawn().host()
