"""The sampling steps of one sequence, from core and from plugins, in execution order.

Built with the sampler, once per sequence. Steps run in their default order unless the request lists them. Steps that
come first in nearly every order are taken out of the list and applied directly at no extra cost: penalties that change
the row before any other step reads it, and a fixed temperature after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.sampler import CORE_ORDER
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.candidates import MinP, Step, Temperature, TopK, TopP, bounded_temperature
from enginehouse.engine.sampling.penalties import Penalties, RowPenalty, TokenHistory
from enginehouse.engine.sampling.plugin_steps import PluginStep

__all__ = ["Chain", "arrange"]


@frozen(eq=False)
class Chain:
    """Processing of a row of logits after the bias.

    Attributes:
        changes: the penalties that come first; each changes the row in place.
        temperature: temperature of the row after these and the mask.
        steps: all other steps, in order.
        late_changes: the penalties among ``steps``; greedy sampling, which needs no other step, applies them as well.
    """

    changes: tuple[Callable[[NDArray[np.float32]], None], ...]
    temperature: float
    steps: tuple[Step, ...]
    late_changes: tuple[Callable[[NDArray[np.float32]], None], ...] = ()


def arrange(
    params: SamplingParams,
    vocab_size: int,
    penalties: Penalties | None,
    plugin_steps: Sequence[PluginStep],
    history: TokenHistory | None,
) -> Chain:
    """Build the chain of one sequence. ``history`` is required if a plugin step is a penalty or processor."""
    temperature = bounded_temperature(params.temperature)
    first = [step.bind(history, temperature) for step in plugin_steps if step.role == "processor"]
    others = [step for step in plugin_steps if step.role not in ("processor", "weights")]
    last = [step.bind(history, temperature) for step in plugin_steps if step.role == "weights"]
    places = [(step.order, step.bind(history, temperature)) for step in others]
    sets_temperature = any(step.name == "temperature" for _, step in places)
    core = _core_steps(params, vocab_size, penalties, None if sets_temperature else temperature)
    places += [(CORE_ORDER[step.name], step) for step in core]
    last = [step for step in last if params.samplers is None or step.name in params.samplers]
    return _split([*first, *_in_order(places, params.samplers), *last])


def _core_steps(
    params: SamplingParams, vocab_size: int, penalties: Penalties | None, temperature: float | None
) -> list[Step]:
    """Return core's steps that ``params`` enable."""
    steps: list[Step] = []
    if penalties is not None:
        steps.append(RowPenalty("penalties", penalties.apply))
    if temperature is not None and temperature != 1.0:
        steps.append(Temperature(temperature))
    if 0 < params.top_k < vocab_size:
        steps.append(TopK(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopP(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinP(params.min_p))
    return steps


def _in_order(places: Iterable[tuple[int, Step]], listed: Sequence[str] | None) -> list[Step]:
    """Sort steps by order, then name; with ``listed``, return only the listed steps, in that order."""
    if listed is None:
        return [step for _, step in sorted(places, key=lambda place: (place[0], place[1].name))]
    by_name = {step.name: step for _, step in places}
    return [by_name[name] for name in listed if name in by_name]


def _split(steps: Sequence[Step]) -> Chain:
    changes: list[Callable[[NDArray[np.float32]], None]] = []
    rest = list(steps)
    for step in steps:
        if not isinstance(step, RowPenalty):
            break
        changes.append(step.change)
        rest.pop(0)
    first = rest[0] if rest else None
    temperature = first.value if isinstance(first, Temperature) else 1.0
    rest = rest[1:] if isinstance(first, Temperature) else rest
    late = tuple(step.change for step in rest if isinstance(step, RowPenalty))
    return Chain(tuple(changes), temperature, tuple(rest), late)
