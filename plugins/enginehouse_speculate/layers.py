"""Self-speculative decoding: the first layers of a model draft, and all layers verify.

Backends that can exit a forward pass after some layers do so: the weights and the KV memory of these layers are the
model's own; positions of drafted tokens are removed from it before all layers compute them. Backends that cannot, but
can open the first layers as a separate model, provide that, and it drafts like a smaller model. Source: Zhang et al.,
"Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" (ACL 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from attrs.validators import ge, gt, le, optional
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.drafter import BoundDrafter, Draft, DraftContext, DraftTask
from enginehouse.contract.errors import CacheFull, ModelLoadError
from enginehouse_speculate.greedy import GreedyDraft, write_greedily
from enginehouse_speculate.second_model import SecondModel

__all__ = ["LayersDrafter", "LayersOptions"]


@frozen(kw_only=True)
class LayersOptions:
    """Settings of the drafter ``layers``.

    Attributes:
        num_layers: number of layers that draft; unset is the fewest, but at least half, that the model offers.
        min_probability: a draft ends before a token that these layers consider less probable than this.
        max_tokens: longest draft.
    """

    num_layers: int | None = field(default=None, validator=optional(gt(0)))
    min_probability: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    max_tokens: int = field(default=8, validator=gt(0))


@define(eq=False)
class LayersDrafter:
    """The registered drafter."""

    name: str = "layers"
    api_version: int = 1
    options: type[LayersOptions] = LayersOptions

    def choose_layers(self, options: LayersOptions, num_layers: int) -> int:
        """Return half of the layers unless the settings give a number."""
        return options.num_layers or (num_layers + 1) // 2

    def bind(self, context: DraftContext, options: LayersOptions) -> BoundDrafter:
        """Return the drafter for a model with early exit or separately loadable first layers.

        Raises:
            ModelLoadError: the model has neither, not for ``num_layers``, or cannot be truncated.
        """
        offered, truncate = context.runner.capabilities.exit_layers, context.runner.capabilities.truncate
        if context.open_second is not None and truncate != "none":
            return SecondModel(context.open_second(), options.min_probability, options.max_tokens)
        if not offered and context.open_second is None:
            raise ModelLoadError("needs a backend that can run some of a model's layers")
        if truncate != "any":
            raise ModelLoadError("needs a model that can take single tokens back")
        half = [layers for layers in offered if 2 * layers >= max(offered)]
        num_layers = options.num_layers or min(half)
        if num_layers not in offered:
            listed = ", ".join(map(str, offered))
            raise ModelLoadError(f"num_layers: this model can be left after {listed} layers, not {num_layers}")
        return _Layers(context.runner, num_layers, options)


@define(eq=False, kw_only=True)
class _Growing(GreedyDraft):
    """The draft of one task."""

    task: DraftTask


@define(eq=False)
class _Layers:
    runner: Runner
    num_layers: int
    settings: LayersOptions
    is_free: bool = False
    prior: float = 0.6

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> object:
        """No state is needed for a sequence."""
        return self

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft with the first layers."""
        growing = [
            _Growing(
                task=task,
                due=[int(task.token_ids[-1])],
                max_tokens=min(task.max_tokens, self.settings.max_tokens),
                min_probability=self.settings.min_probability,
            )
            for task in tasks
        ]
        try:
            write_greedily(growing, self._forward)
        finally:
            for one in growing:
                self.runner.truncate(one.task.sequence, len(one.task.token_ids) - 1)
        return [one.finished() for one in growing]

    def close(self, _: object) -> None:
        """Nothing to release."""

    def shutdown(self) -> None:
        """Nothing to release."""

    def _forward(self, growing: Sequence[_Growing]) -> NDArray[np.float32] | None:
        spans = [
            Span(
                one.task.sequence,
                len(one.task.token_ids) - 1 + len(one.token_ids),
                np.array(one.due, np.int32),
                num_layers=self.num_layers,
            )
            for one in growing
        ]
        try:
            return self.runner.forward(spans).host()
        except CacheFull:
            return None
