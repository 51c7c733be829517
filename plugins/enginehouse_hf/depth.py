"""Running only the first layers of a model: which numbers of layers it offers, the shorter models, mixed batches.

A shorter model is the model itself with the end of its list of layers left out: the same weights, the same memory,
then the output norm and projection. Both runners use it for spans with ``num_layers``.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from torch import nn

from enginehouse.contract.backend import Span

__all__ = ["Depths", "exit_layers", "groups_by", "own_modules", "row_order"]

_Way = TypeVar("_Way", bound=Hashable)


def exit_layers(model: Any) -> tuple[int, ...]:
    """Numbers of layers that the model can stop after; none where its layers are built in an unknown way.

    accelerate's hooks bind modules to their owner, so that a copy of the model would run the whole one.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != model.config.get_text_config().num_hidden_layers:
        return ()
    if hasattr(model, "_hf_hook") or any(hasattr(module, "_hf_hook") for module in model.base_model.modules()):
        return ()
    return tuple(range(1, len(layers)))


class Depths:
    """A model and its shorter forms, each made when it is first asked for."""

    def __init__(self, model: Any) -> None:
        self._models: dict[int | None, Any] = {None: model}

    def model(self, num_layers: int | None) -> Any:
        """The model with its first ``num_layers`` layers; None is all."""
        if num_layers not in self._models:
            self._models[num_layers] = _shortened(self._models[None], num_layers)
        return self._models[num_layers]


def _shortened(model: Any, num_layers: int | None) -> Any:
    body = own_modules(model.base_model)
    body.layers = nn.ModuleList(list(body.layers)[:num_layers])
    short = own_modules(model)
    setattr(short, model.base_model_prefix, body)
    return short


def own_modules(module: nn.Module) -> Any:
    """A copy that shares every weight and child, whose list of children is its own."""
    own = copy.copy(module)
    own._modules = dict(module._modules)  # copy.copy would share it
    return own


def groups_by(ways: Sequence[_Way]) -> dict[_Way, list[int]]:
    """Which spans, by index, take which way; each has its way in the list."""
    groups: dict[_Way, list[int]] = {}
    for index, way in enumerate(ways):
        groups.setdefault(way, []).append(index)
    return groups


def row_order(spans: Sequence[Span], sizes: Sequence[int], groups: Mapping[Any, list[int]]) -> list[int]:
    """Where each row, in the order of the spans, lies when the rows of the groups stand one behind the other."""
    numbers = [{"none": 0, "last": 1, "all": size}[span.outputs] for span, size in zip(spans, sizes, strict=True)]
    grouped = [index for indices in groups.values() for index in indices]
    ends = accumulate(numbers[index] for index in grouped)
    begins = {index: end - numbers[index] for index, end in zip(grouped, ends, strict=True)}
    return [begins[index] + row for index, number in enumerate(numbers) for row in range(number)]
