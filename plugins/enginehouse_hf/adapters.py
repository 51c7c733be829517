"""Adapters (LoRA) of PEFT's folders on transformers models: stacked low-rank updates, all of a pass at once.

A forward hook of each adapted linear layer adds ``scale * B (A x)`` to the rows of each adapter's tokens. The tokens
are grouped by adapter once per pass; a layer then has two batched products, which read each adapter's halves once.
Used by the runner for the CPU; that for CUDA (``cuda/stacks.py``) reads folders with it. peft is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan
from enginehouse_backendkit.lora_folder import read_lora_folder
from enginehouse_hf.linears import PreparedLinear

__all__ = ["Adapters", "Halves", "LayerForm", "adaptable_linears", "read_peft_folder"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)

_MAX_FILLED = 2
"""All adapters of a pass are one group if filling up at most doubles their tokens; otherwise each is a group."""


@frozen(eq=False)
class Halves:
    """The weights of one adapter for one layer: (rank, inputs) and (outputs, rank); B has the adapter's own scale."""

    a: Tensor
    b: Tensor


@frozen
class LayerForm:
    """A linear layer that can be adapted; ``device`` and ``dtype`` are those that its adapters get."""

    num_outputs: int
    num_inputs: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, linear: nn.Linear | PreparedLinear) -> LayerForm:
        """Return the form of a module."""
        if isinstance(linear, PreparedLinear):
            return cls(linear.out_features, linear.in_features, torch.device("cpu"), torch.float32)
        return cls(linear.out_features, linear.in_features, linear.weight.device, linear.weight.dtype)


def read_peft_folder(folder: Path, layers: Mapping[str, LayerForm]) -> dict[str, Halves]:
    """Return the halves of each layer that an adapter changes, by the name of the layer.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        layers: those of the model that can be adapted, by name.

    Raises:
        AdapterRefused: names the folder, and what is wrong.
    """
    sizes = {name: (form.num_outputs, form.num_inputs) for name, form in layers.items()}
    made = {}
    for name, halves in read_lora_folder(folder, sizes, _load, _problem_of).items():
        form = layers[name]
        kept = [half.to(form.dtype) for half in (halves.a, halves.scale * halves.b.float())]
        kept[1] = kept[1].t().contiguous().t()  # products read it row by row of its transpose
        if not all(bool(half.isfinite().all()) for half in kept):
            raise AdapterRefused(f"{folder.name}: {name} has numbers that are too large for {form.dtype}", "adapters")
        made[name] = Halves(*(half.to(form.device) for half in kept))
    return made


def adaptable_linears(model: Any, recurrent: Collection[str] = ()) -> dict[str, nn.Linear | PreparedLinear]:
    """Return the layers of a transformers model that can be adapted, by name; see :class:`Adapters`."""
    output, text = model.get_output_embeddings(), set(model.get_decoder().modules())
    kinds = (nn.Linear, PreparedLinear)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and module in text and module is not output and ".experts." not in name
        if not any(name.startswith(f"{other}.") for other in recurrent)
    }


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _problem_of(tensor: Tensor) -> str:
    is_right = tensor.dtype in _TYPES and bool(tensor.isfinite().all())
    return "" if is_right else f"numbers that are not finite, or of the type {tensor.dtype}"


@frozen(eq=False)
class _Stack:
    """Halves of k adapters for one layer, ranks filled up with zeros: a is (k, inputs, rank), b (k, rank, outputs)."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, halves: Sequence[Halves | None]) -> _Stack:
        """Join adapters, of which those without a change of the layer are None."""
        known = [one for one in halves if one is not None]
        if len(halves) == 1:
            return cls(known[0].a.t()[None], known[0].b.t()[None])
        rank = max(len(one.a) for one in known)
        a = known[0].a.new_zeros(len(halves), rank, known[0].a.shape[1])
        b = known[0].b.new_zeros(len(halves), rank, len(known[0].b))
        for place, one in enumerate(halves):
            if one is not None:
                a[place, : len(one.a)] = one.a
                b[place, : len(one.a)] = one.b.t()
        return cls(a.transpose(1, 2), b)


@frozen(eq=False)
class _Group:
    """Tokens of a pass by adapter, equally many of each: those of adapters with fewer are filled up with the scale 0.

    Attributes:
        shape: number k of adapters, number of tokens of each, -1.
        index: (k * size,) int64 places of the tokens; None if the group is the whole pass in order.
        scales: (k, size, 1); None if all are 1.
        stacks: those of the layers that one of the adapters changes.
    """

    shape: tuple[int, int, int]
    index: Tensor | None
    scales: Tensor | None
    stacks: Mapping[str, _Stack]

    def add(self, name: str, x: Tensor, output: Tensor) -> None:
        """Add the update of a layer to ``output``, (T, outputs), in place; ``x`` is (T, inputs)."""
        stack = self.stacks.get(name)
        if stack is None:
            return
        index = None if self.index is None else self.index.to(x.device)
        chosen = x if index is None else x.index_select(0, index)
        low = torch.bmm(chosen.view(self.shape), stack.a)  # (k, size, rank)
        if self.scales is not None:
            low *= self.scales.to(x.device)
        if index is None:
            output.view(self.shape).baddbmm_(low, stack.b)
        else:
            output.index_add_(0, index, torch.bmm(low, stack.b).view(len(index), -1))


class Adapters:
    """The loaded adapters of one model; holds the hooks of its layers while any is loaded.

    Args:
        model: a transformers model. Quantised layers, experts, embeddings, the output layer and the parts that read
            images are not adapted: experts see the tokens in another order, and an embedding of an image is kept for
            requests with any adapter.
        recurrent: names of its recurrent modules, which are not adapted: they see the tokens in another order, too.
    """

    def __init__(self, model: Any, recurrent: Collection[str] = ()) -> None:
        self._linears = adaptable_linears(model, recurrent)
        self._device = model.device
        self._loaded: dict[int, dict[str, Halves]] = {}
        self._next = 1
        self._hooks: dict[str, Any] = {}
        self._stacks: dict[tuple[int, ...], dict[str, _Stack]] = {}
        self._groups: list[_Group] = []
        self._num_tokens = 0

    def load(self, path: Path) -> int:
        """Load a folder; return its handle. Raises AdapterRefused."""
        halves = read_peft_folder(path, {name: LayerForm.of(linear) for name, linear in self._linears.items()})
        handle, self._next = self._next, self._next + 1
        self._loaded[handle] = halves
        for name in halves:
            if name not in self._hooks:
                self._hooks[name] = self._linears[name].register_forward_hook(self._hook(name))
        return handle

    def unload(self, adapter: int) -> None:
        """Free an adapter, and the hooks that no other one needs."""
        del self._loaded[adapter]
        self._groups = []
        self._stacks = {handles: stacks for handles, stacks in self._stacks.items() if adapter not in handles}
        for name in list(self._hooks):
            if not any(name in halves for halves in self._loaded.values()):
                self._hooks.pop(name).remove()

    def check(self, adapters: AdapterSet) -> None:
        """Raise InvalidSpan if one of a set is not loaded."""
        for handle, _ in adapters:
            if handle not in self._loaded:
                raise InvalidSpan(f"adapter {handle} is not loaded")

    def begin(self, spans: Sequence[tuple[AdapterSet, int]]) -> None:
        """Prepare a pass over spans with these adapters and numbers of tokens, which follow each other."""
        tokens: dict[int, list[tuple[range, float]]] = {}
        self._num_tokens = 0
        for adapters, size in spans:
            begin, self._num_tokens = self._num_tokens, self._num_tokens + size
            for handle, scale in adapters:
                if scale:
                    tokens.setdefault(handle, []).append((range(begin, self._num_tokens), scale))
        sizes = {handle: sum(len(places) for places, _ in tokens[handle]) for handle in sorted(tokens)}
        together = len(sizes) * max(sizes.values(), default=0) <= _MAX_FILLED * sum(sizes.values())
        chosen = [tuple(sizes)] if together else [(handle,) for handle in sizes]
        self._groups = [self._group(handles, tokens) for handles in chosen if handles]

    def _group(self, handles: tuple[int, ...], tokens: Mapping[int, Sequence[tuple[range, float]]]) -> _Group:
        places = [[place for span, _ in tokens[handle] for place in span] for handle in handles]
        scales = [[scale for span, scale in tokens[handle] for _ in span] for handle in handles]
        size = max(len(one) for one in places)
        index = [place for one in places for place in [*one, *one[:1] * (size - len(one))]]
        filled = [scale for one in scales for scale in [*one, *[0.0] * (size - len(one))]]
        is_whole = index == list(range(self._num_tokens))
        return _Group(
            (len(handles), size, -1),
            None if is_whole else torch.tensor(index, device=self._device),
            None if set(filled) == {1.0} else torch.tensor(filled, device=self._device).view(len(handles), size, 1),
            self._stacks_of(handles),
        )

    def _stacks_of(self, handles: tuple[int, ...]) -> dict[str, _Stack]:
        """Return the stacks of each layer; joined ones are kept until others are needed."""
        if handles not in self._stacks:
            self._stacks = {known: stacks for known, stacks in self._stacks.items() if len(known) < 2}
            loaded = [self._loaded[handle] for handle in handles]
            self._stacks[handles] = {
                name: _Stack.of([halves.get(name) for halves in loaded])
                for name in self._hooks
                if any(name in halves for halves in loaded)
            }
        return self._stacks[handles]

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self._groups:
                return
            x = inputs[0]
            width = x.shape[-1]
            assert x.numel() == self._num_tokens * width, f"{name} does not see the tokens of the pass in order"
            for group in self._groups:
                group.add(name, x.reshape(-1, width), output.view(-1, output.shape[-1]))

        return add
