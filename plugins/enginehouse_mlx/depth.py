"""A model with an exchangeable list of layers, after a numerical test that its first layers behave as before.

Running fewer layers means running the model without the last entries of its layer list: the same weights, the same
memory, then the output norm and projection. mlx-lm's models keep their layers in one list and run them in order; the
location of that list is searched, not looked up by model name. A model that works differently, or whose layers share
keys and values, offers no exits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx import nn

from enginehouse_mlx.batch import Batch
from enginehouse_mlx.cache import SlotMemory
from enginehouse_mlx.halves import PROBE, ModelHalves, agrees

__all__ = ["LayerSwitch", "LayeredModel", "find_layers"]


@frozen(eq=False)
class LayeredModel:
    """A callable model with all or some of its layers.

    Attributes:
        model: the whole model as mlx-lm loaded it.
        halves: its parts.
        path: names of the modules from its body to its list of layers, and of that list; empty if the layers cannot be
            exchanged.
        layers: that list.
        exit_layers: layer counts after which it can stop.
        make_memory: creates caches for all layers, for tests.
    """

    model: Any
    halves: ModelHalves
    path: tuple[str, ...]
    layers: tuple[Any, ...]
    exit_layers: tuple[int, ...]
    make_memory: Callable[[], SlotMemory]

    def body(self, num_layers: int | None) -> Callable[[mx.array, Any], mx.array]:
        """Return the body with the first ``num_layers`` layers, None is all; see ``halves.ModelHalves``."""
        return self.halves.body if num_layers is None else self.with_layers(self.layers[:num_layers])

    def with_layers(self, layers: Sequence[Any]) -> Callable[[mx.array, Any], mx.array]:
        """Return the body with other layers in place of its own."""
        body: Callable[[mx.array, Any], mx.array] = _with_list(self.halves.body, self.path, list(layers))
        return body


class LayerSwitch:
    """Replaces a layer in the list; other attributes are forwarded to the layer.

    Args:
        layer: such as mlx-lm's ``TransformerBlock``.
        call: replaces the layer's own call.
    """

    def __init__(self, layer: Any, call: Callable[..., mx.array]) -> None:
        self._layer = layer
        self._call = call

    def __call__(self, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        """States after the layer."""
        return self._call(hidden, *others, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def find_layers(model: Any, halves: ModelHalves, memory: SlotMemory) -> LayeredModel:
    """Determine the layer counts after which an mlx-lm model can stop.

    Args:
        model: its ``layers`` are all layers, as in every model of mlx-lm.
        halves: its parts. Models with recurrent layers offer no exits: each token must update all states.
        memory: the memory that will serve it; learns the shape of each layer's keys and values here.
    """

    def make_memory() -> SlotMemory:
        return SlotMemory(model)

    _run_probe(halves.body, memory)
    layers = tuple(getattr(model, "layers", ()))
    path = _path_to(halves.body, layers)
    found = LayeredModel(model, halves, path, layers, tuple(range(1, len(layers))), make_memory)
    tried = {*found.exit_layers[:1], *found.exit_layers[-1:]}
    if path and not memory.states and all(_is_beginning(found, memory, num_layers) for num_layers in tried):
        return found
    return evolve(found, path=(), exit_layers=())


def _is_beginning(model: LayeredModel, whole: SlotMemory, num_layers: int) -> bool:
    """True if the first layers alone write what they wrote in the whole model, and the others nothing."""

    def compute() -> mx.array:
        memory = model.make_memory()
        _run_probe(model.body(num_layers), memory)
        if any(layer.keys is not None for layer in memory.layers[num_layers:]):
            raise ValueError("layers above the last one have run")
        return _written(memory, num_layers)

    return len(whole.layers) == len(model.layers) and agrees(_written(whole, num_layers), compute, 1e-4)


def _run_probe(body: Callable[[mx.array, Any], mx.array], memory: SlotMemory) -> None:
    body(mx.array([PROBE]), memory.begin(Batch((0,), (0,), len(PROBE))))
    mx.eval(memory.changed)


def _written(memory: SlotMemory, num_layers: int) -> mx.array:
    """Keys and values of the probe in the first layers, flattened."""
    arrays = [
        array for layer in memory.layers[:num_layers] for array in (layer.keys, layer.values) if array is not None
    ]
    return mx.concatenate([array[0, :, : len(PROBE)].reshape(-1) for array in arrays])


def _path_to(module: Any, layers: Sequence[Any]) -> tuple[str, ...]:
    """Return the attribute path to this very list; empty if there is none."""
    for name, child in module.items():
        if isinstance(child, list) and len(child) == len(layers) and all(map(is_, child, layers)):
            return (name,)
        if isinstance(child, nn.Module) and (rest := _path_to(child, layers)):
            return (name, *rest)
    return ()


def _with_list(module: Any, path: tuple[str, ...], layers: list[Any]) -> Any:
    """Return a copy of the module that shares everything except the list at the end of the path."""
    own = copy.copy(module)
    own[path[0]] = _with_list(module[path[0]], path[1:], layers) if path[1:] else layers
    return own
