"""Running only the first layers of a model: supported layer counts, the shortened models, mixed batches.

A shortened model is the model itself without the last entries of its layer list: the same weights and the same
memory, then the output norm and projection. Both runners use it for spans with ``num_layers``.
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
    """Return the layer counts after which the model can stop; empty if the layout of its layers is unknown.

    Excludes models with accelerate hooks: these bind modules to their owner, so a copy would run the full model.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != model.config.get_text_config().num_hidden_layers:
        return ()
    if hasattr(model, "_hf_hook") or any(hasattr(module, "_hf_hook") for module in model.base_model.modules()):
        return ()
    return tuple(range(1, len(layers)))


class Depths:
    """A model and its shortened forms, each created on first use."""

    def __init__(self, model: Any) -> None:
        self._models: dict[int | None, Any] = {None: model}

    def model(self, num_layers: int | None) -> Any:
        """Return the model with its first ``num_layers`` layers; None is all."""
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
    """Return a copy of a module that shares all weights and children but has its own dict of children."""
    own = copy.copy(module)
    own._modules = dict(module._modules)  # copy.copy would share it
    return own


def groups_by(ways: Sequence[_Way]) -> dict[_Way, list[int]]:
    """Group span indices by execution path; ``ways`` holds the path of each span."""
    groups: dict[_Way, list[int]] = {}
    for index, way in enumerate(ways):
        groups.setdefault(way, []).append(index)
    return groups


def row_order(spans: Sequence[Span], sizes: Sequence[int], groups: Mapping[Any, list[int]]) -> list[int]:
    """Return the index of each row, in span order, within the concatenated rows of all groups."""
    numbers = [{"none": 0, "last": 1, "all": size}[span.outputs] for span, size in zip(spans, sizes, strict=True)]
    grouped = [index for indices in groups.values() for index in indices]
    ends = accumulate(numbers[index] for index in grouped)
    begins = {index: end - numbers[index] for index, end in zip(grouped, ends, strict=True)}
    return [begins[index] + row for index, number in enumerate(numbers) for row in range(number)]
