"""The truncation steps of one sequence: core's own and those that sampler plugins bring.

Called by the sampler. The first step of a sequence reads the row of logits (``start``); the others thin
out what the steps before them left (``narrow``). A plugin that misbehaves fails its request and is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.engine.candidates import Head, LogitRow, bounded_by_mass, bounded_by_ratio
from enginehouse.errors import GenerationFailed
from enginehouse.sampler import Candidates, SamplerPlugin, TruncationStep
from enginehouse.structuring import find_problems, strict_converter
from enginehouse.types import SamplingParams

__all__ = ["MinP", "PluginStep", "Step", "TopK", "TopP", "Uniform", "build_steps", "core_steps"]

Uniform = Callable[[str], float]


class Step(Protocol):
    """One truncation step of one sequence. ``number(purpose)`` is a replayable number in [0, 1)."""

    @property
    def order(self) -> int:
        """Place among the steps, ascending."""
        ...

    def start(self, row: LogitRow, number: Uniform) -> Head:
        """What this step leaves of the whole row."""
        ...

    def narrow(self, row: LogitRow, head: Head, number: Uniform) -> Head:
        """What this step leaves of ``head``, which came out of ``row``."""
        ...


@frozen
class TopK:
    """Keeps the ``count`` most probable tokens."""

    count: int
    order: int = 10

    def start(self, row: LogitRow, number: Uniform) -> Head:
        """See :class:`Step`."""
        return row.top(self.count)

    def narrow(self, row: LogitRow, head: Head, number: Uniform) -> Head:
        """See :class:`Step`."""
        return head[: self.count]


@frozen
class TopP:
    """Keeps the smallest number of most probable tokens that hold ``mass`` of what is left."""

    mass: float
    order: int = 30

    def start(self, row: LogitRow, number: Uniform) -> Head:
        """See :class:`Step`."""
        return row.nucleus(self.mass)

    def narrow(self, row: LogitRow, head: Head, number: Uniform) -> Head:
        """See :class:`Step`."""
        return bounded_by_mass(head, self.mass)


@frozen
class MinP:
    """Keeps tokens with at least ``ratio`` of the most probable remaining token's probability."""

    ratio: float
    order: int = 40

    def start(self, row: LogitRow, number: Uniform) -> Head:
        """See :class:`Step`."""
        return row.at_least(self.ratio)

    def narrow(self, row: LogitRow, head: Head, number: Uniform) -> Head:
        """See :class:`Step`."""
        return bounded_by_ratio(head, self.ratio)


@frozen(eq=False)
class PluginStep:
    """One plugin's step. See :class:`enginehouse.sampler.SamplerPlugin` for the fields.

    Whatever ``full_row`` says, it sees every token that earlier steps left, the whole row when it comes first: a sort
    of the whole row costs no more than finding the tokens that hold nearly all of the probability.
    """

    order: int
    full_row: bool
    step: TruncationStep
    plugin: str

    def start(self, row: LogitRow, number: Uniform) -> Head:
        """See :class:`Step`."""
        return self.narrow(row, row.whole(), number)

    def narrow(self, row: LogitRow, head: Head, number: Uniform) -> Head:
        """See :class:`Step`.

        Raises:
            GenerationFailed: the plugin raised, gave a wrong shape or left no token.
        """
        token_ids = head.token_ids.astype(np.int32)
        scaled = (row.logits[token_ids].astype(np.float64) / row.temperature).astype(np.float32)
        candidates = Candidates(token_ids, scaled, _read_only(row.logits), row.temperature, self._own(number))
        try:
            keep = np.asarray(self.step(candidates))
        except Exception as error:  # a plugin's mistake costs its own request only
            raise GenerationFailed(f"the sampler {self.plugin!r} failed: {error!r}", self.plugin) from error
        if keep.dtype != np.bool_ or keep.shape != token_ids.shape:
            message = (
                f"the sampler {self.plugin!r} returned {keep.dtype} of shape {keep.shape}; "
                f"bool of shape {token_ids.shape} was expected"
            )
            raise GenerationFailed(message, self.plugin)
        if not keep.any():
            raise GenerationFailed(f"the sampler {self.plugin!r} left no token to draw", self.plugin)
        return head[keep]

    def _own(self, number: Uniform) -> Uniform:
        """Numbers of this plugin, so that two plugins with the same purpose do not share one."""
        return lambda purpose: number(f"{self.plugin}:{purpose}")


def core_steps(params: SamplingParams, vocab_size: int) -> tuple[Step, ...]:
    """Core's truncation steps that ``params`` turn on."""
    steps: list[Step] = []
    if 0 < params.top_k < vocab_size:
        steps.append(TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopP(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinP(params.min_p))
    return tuple(steps)


def build_steps(params: SamplingParams, samplers: Mapping[str, SamplerPlugin]) -> tuple[PluginStep, ...]:
    """The plugins' truncation steps for one sequence, in the order in which they run.

    Args:
        params: its ``extensions`` name the plugins.
        samplers: the plugins of this process, by name.

    Raises:
        GenerationFailed: a plugin is missing, refused its fields or raised; the error names it.
    """
    steps = []
    converter = strict_converter()
    for name, values in params.extensions.items():
        plugin = samplers.get(name)
        if plugin is None:
            raise GenerationFailed(f"the sampler plugin {name!r} is not installed where the model runs", name)
        try:
            step = plugin.create(converter.structure(values, plugin.request_fields))
        except Exception as error:
            problems = "; ".join(map(str, find_problems(error)))
            raise GenerationFailed(f"the sampler {name!r} refused its fields: {problems}", name) from error
        if step is not None:
            steps.append(PluginStep(plugin.order, plugin.full_row, step, name))
    return tuple(sorted(steps, key=lambda step: (step.order, step.plugin)))


def _read_only(row: NDArray[np.float32]) -> NDArray[np.float32]:
    view = row.view()
    view.flags.writeable = False
    return view
