"""Adapters (LoRA) on mlx-lm models: stacked low-rank updates, gathered for each row of a pass.

An adapted linear layer is replaced by a switch that adds ``B (scale * (A x))``. The halves of all loaded adapters are
stacked per layer, padded to the highest rank; place 0 is zero, for rows of the base model. Each row of a pass gives the
place of its adapter, so that a pass has two further products per layer for any mixture, and no step copies weights:
the stacks change when an adapter is loaded or unloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from attrs import frozen
from mlx import nn
from mlx.utils import tree_flatten

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan
from enginehouse_backendkit.lora_folder import LoraHalves
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.depth import LayeredModel
from enginehouse_mlx.halves import PROBE
from enginehouse_mlx.lora_files import read_adapter

__all__ = ["Adapters"]


@frozen(eq=False)
class _Linear:
    """A linear layer that can be adapted: ``parent[key]`` is ``layer``; ``dtype`` is that of its adapters."""

    parent: Any
    key: str
    layer: Any
    dtype: mx.Dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.layer.weight.shape
        if isinstance(self.layer, nn.QuantizedLinear):
            inputs = self.layer.scales.shape[-1] * self.layer.group_size
        return outputs, inputs


@frozen(eq=False)
class _Places:
    """For each row, up to K adapters: places in a stack and scales.

    Attributes:
        rows: (B, 1) uint32, the row's own number.
        places: (B, K) uint32.
        scales: (B, K, 1, 1) float32.
    """

    rows: mx.array
    places: mx.array
    scales: mx.array


class _Pass:
    """The adapters of the rows of the current model call.

    Attributes:
        num_tokens: tokens of each row.
        called: names of the adapted layers that ran.
    """

    def __init__(self) -> None:
        self.begin((), 0)

    def begin(self, sets: Sequence[AdapterSet], num_tokens: int) -> None:
        """Set the adapters of each row; no rows: the base model."""
        self.sets, self.num_tokens = sets, num_tokens
        self.called: set[str] = set()
        self._places: dict[tuple[int, ...], _Places | None] = {}

    def places(self, handles: tuple[int, ...]) -> _Places | None:
        """Return the places of the rows' adapters in a stack of these handles; None if it has none of them."""
        if handles not in self._places:
            self._places[handles] = self._find(handles)
        return self._places[handles]

    def _find(self, handles: tuple[int, ...]) -> _Places | None:
        place = {handle: number for number, handle in enumerate(handles, start=1)}
        rows = [[(place[handle], scale) for handle, scale in one if handle in place] for one in self.sets]
        width = max(map(len, rows), default=0)
        if not width:
            return None
        padded = [[*row, *[(0, 0.0)] * (width - len(row))] for row in rows]
        return _Places(
            mx.arange(len(rows), dtype=mx.uint32)[:, None],
            mx.array([[number for number, _ in row] for row in padded], mx.uint32),
            mx.array([[scale for _, scale in row] for row in padded])[:, :, None, None],
        )


class _AdaptedLinear:
    """Replaces a linear layer; other attributes are forwarded to it.

    Attributes:
        handles: loaded adapters of this layer; that at index i has place i + 1 in the stacks.
        a: (1 + num_adapters, inputs, highest rank).
        b: (1 + num_adapters, highest rank, outputs).
    """

    def __init__(self, name: str, linear: _Linear, now: _Pass) -> None:
        outputs, inputs = linear.sizes
        self._name, self._linear, self._now = name, linear.layer, now
        self._dtype = linear.dtype
        self._ranks: dict[int, int] = {}
        self.handles: tuple[int, ...] = ()
        self.a, self.b = mx.zeros((1, inputs, 0), linear.dtype), mx.zeros((1, 0, outputs), linear.dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """(..., outputs) of (..., inputs), which are the tokens of all rows in order."""
        output: mx.array = self._linear(x)
        now, places = self._now, self._now.places(self.handles)
        if places is None:
            return output
        num_rows, width = len(now.sets), x.shape[-1]
        assert x.size == num_rows * now.num_tokens * width, f"{self._name} does not get the tokens of the pass in order"
        now.called.add(self._name)
        tokens = x.reshape(num_rows, now.num_tokens, width).astype(self._dtype)
        low = mx.gather_mm(tokens, self.a, lhs_indices=places.rows, rhs_indices=places.places)  # (B, K, N, rank)
        low = (low * places.scales).astype(self._dtype)
        update = mx.gather_mm(low, self.b, rhs_indices=places.places).sum(axis=1)  # (B, N, outputs)
        return output + update.reshape(output.shape).astype(output.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)

    def add(self, handle: int, halves: LoraHalves[mx.array]) -> None:
        """Append an adapter to the stacks."""
        a, b = halves.a.T, halves.scale * halves.b.T.astype(mx.float32)
        self._ranks[handle] = a.shape[-1]
        self.handles = (*self.handles, handle)
        rank = max(self._ranks.values())
        self.a = mx.concatenate([_padded(self.a, 2, rank), _padded(a.astype(self._dtype)[None], 2, rank)])
        self.b = mx.concatenate([_padded(self.b, 1, rank), _padded(b.astype(self._dtype)[None], 1, rank)])

    def drop(self, handle: int) -> None:
        """Remove an adapter from the stacks."""
        del self._ranks[handle]
        kept = [0, *(place for place, one in enumerate(self.handles, start=1) if one != handle)]
        self.handles = tuple(one for one in self.handles if one != handle)
        rank = max(self._ranks.values(), default=0)
        self.a, self.b = self.a[mx.array(kept), :, :rank], self.b[mx.array(kept), :rank]


class Adapters:
    """The loaded adapters of one model; linear layers are replaced while an adapter changes them.

    Args:
        model: linear layers inside its list of layers can be adapted, quantised ones included; stacked experts,
            embeddings and the output layer cannot.
    """

    def __init__(self, model: LayeredModel) -> None:
        self._model = model
        self._linears = _find_linears(model.model, model.layers)
        self._adapted: dict[str, _AdaptedLinear] = {}
        self._loaded: set[int] = set()
        self._next = 1
        self._now = _Pass()

    def load(self, path: Path) -> int:
        """Load a folder; return its handle. Raises AdapterRefused."""
        halves = read_adapter(path, {name: linear.sizes for name, linear in self._linears.items()})
        handle, self._next = self._next, self._next + 1
        for name, half in halves.items():
            if name not in self._adapted:
                linear = self._linears[name]
                self._adapted[name] = _AdaptedLinear(name, linear, self._now)
                linear.parent[linear.key] = self._adapted[name]
            self._adapted[name].add(handle, half)
        self._loaded.add(handle)
        try:
            self._check_use(handle, halves)
            mx.eval([(one.a, one.b) for one in self._adapted.values()])
        except (AssertionError, RuntimeError, ValueError) as error:
            self.unload(handle)
            raise AdapterRefused(f"{path.name}: {error}", "adapters") from error
        return handle

    def unload(self, adapter: int) -> None:
        """Free an adapter, and restore the layers that no other one changes."""
        self._loaded.remove(adapter)
        for name, one in list(self._adapted.items()):
            if adapter in one.handles:
                one.drop(adapter)
            if not one.handles:
                linear = self._linears[name]
                linear.parent[linear.key] = linear.layer
                del self._adapted[name]
        mx.eval([(one.a, one.b) for one in self._adapted.values()])

    def check(self, adapters: AdapterSet) -> None:
        """Raise InvalidSpan if one of a set is not loaded."""
        for handle, _ in adapters:
            if handle not in self._loaded:
                raise InvalidSpan(f"adapter {handle} is not loaded")

    @contextmanager
    def applied(self, sets: Sequence[AdapterSet], num_tokens: int) -> Iterator[None]:
        """Model calls inside have rows with these adapters, of ``num_tokens`` tokens each."""
        if any(sets):
            self._now.begin([tuple(use for use in one if use[1]) for one in sets], num_tokens)
        try:
            yield
        finally:
            self._now.begin((), 0)

    def _check_use(self, handle: int, halves: Mapping[str, object]) -> None:
        """Raise if the model does not call an adapted layer with all tokens, or a pass with the adapter fails."""
        with self.applied([((handle, 1.0),)], len(PROBE)):
            caches = self._model.make_memory().begin(Batch((0,), (0,), len(PROBE)))
            mx.eval(self._model.body(None)(mx.array([PROBE]), caches))
            unused = sorted(set(halves) - self._now.called)
        if unused:
            raise ValueError(f"this model's code uses {unused[0]} in a way that cannot be adapted")


def _find_linears(model: Any, layers: Sequence[Any]) -> dict[str, _Linear]:
    """Return the linear layers inside a model's list of layers, by name."""
    inside = {id(module) for layer in layers for _, module in layer.named_modules()}
    floats = [array.dtype for _, array in tree_flatten(model.parameters()) if mx.issubdtype(array.dtype, mx.floating)]
    found = {}
    for name, parent in model.named_modules():
        for key, child in parent.items() if id(parent) in inside else ():
            if type(child) in (nn.Linear, nn.QuantizedLinear):
                own = child.weight.dtype if type(child) is nn.Linear else child.scales.dtype
                dtype = own if mx.issubdtype(own, mx.floating) else floats[0]  # scales of MXFP4 are integers
                if mx.default_device().type == mx.DeviceType.cpu:
                    dtype = mx.float32  # gather_mm has no other type there
                found[f"{name}.{key}"] = _Linear(parent, key, child, dtype)
    return found


def _padded(stack: mx.array, axis: int, rank: int) -> mx.array:
    """Return a stack with zeros up to a rank."""
    missing = [(0, rank - size if place == axis else 0) for place, size in enumerate(stack.shape)]
    return mx.pad(stack, missing)
