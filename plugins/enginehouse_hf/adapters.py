"""Adapters (LoRA) of PEFT's folders on transformers models: stacked low-rank updates, all of a pass at once.

A forward hook of each adapted linear layer adds ``B (mask * (A x))``, where A and B are the halves of all adapters of
the pass, joined along their ranks, and the mask has each token's scales. So a pass has two further products per layer,
for any number of adapters. Used by the runner for the CPU; that for CUDA (``cuda/stacks.py``) reads folders with it.
peft is not needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.errors import AdapterRefused, InvalidSpan
from enginehouse_backendkit.lora_folder import read_lora_folder

__all__ = ["Adapters", "Halves", "LayerForm", "adaptable_linears", "read_peft_folder"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    def of(cls, linear: nn.Linear) -> LayerForm:
        """Return the form of a module."""
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
        if not all(bool(half.isfinite().all()) for half in kept):
            raise AdapterRefused(f"{folder.name}: {name} has numbers that are too large for {form.dtype}", "adapters")
        made[name] = Halves(*(half.to(form.device) for half in kept))
    return made


def adaptable_linears(model: Any, recurrent: Collection[str] = ()) -> dict[str, nn.Linear]:
    """Return the layers of a transformers model that can be adapted, by name; see :class:`Adapters`."""
    output, text = model.get_output_embeddings(), set(model.get_decoder().modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in text and module is not output and ".experts." not in name
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


@define
class _Stack:
    """The joined halves of the adapters of a pass for one layer, and the columns of each in the mask."""

    a: Tensor
    b: Tensor
    mask: Tensor


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
        self._loaded: dict[int, dict[str, Halves]] = {}
        self._next = 1
        self._hooks: dict[str, Any] = {}
        self._joined: tuple[tuple[int, ...], dict[str, tuple[Tensor, Tensor, tuple[int, ...]]]] = ((), {})
        self._now: dict[str, _Stack] = {}

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
        self._joined, self._now = ((), {}), {}
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
        handles = tuple(sorted({handle for adapters, _ in spans for handle, _ in adapters}))
        self._now = {}
        if not handles:
            return
        if self._joined[0] != handles:
            self._joined = (handles, self._join(handles))
        place = {handle: column for column, handle in enumerate(handles)}
        scales = torch.zeros(sum(size for _, size in spans), len(handles))  # (T, num_adapters)
        end = 0
        for adapters, size in spans:
            begin, end = end, end + size
            for handle, scale in adapters:
                scales[begin:end, place[handle]] += scale
        masks: dict[tuple[int, ...], Tensor] = {}
        for name, (a, b, columns) in self._joined[1].items():
            if columns not in masks:
                masks[columns] = scales[:, list(columns)].to(a)
            self._now[name] = _Stack(a, b, masks[columns].to(a.device))

    def _join(self, handles: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Return for each layer the joined halves, and the number of the adapter of each rank, (sum of ranks,)."""
        joined = {}
        for name in self._hooks:
            parts = [(place, self._loaded[one][name]) for place, one in enumerate(handles) if name in self._loaded[one]]
            if parts:
                columns = tuple(place for place, halves in parts for _ in range(len(halves.a)))
                a = torch.cat([halves.a for _, halves in parts])
                b = torch.cat([halves.b for _, halves in parts], dim=1)
                joined[name] = (a, b.t().contiguous(), columns)
        return joined

    def _hook(self, name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            stack = self._now.get(name)
            if stack is None:
                return output
            x = inputs[0]
            assert x.numel() == len(stack.mask) * x.shape[-1], f"{name} does not see the tokens of the pass in order"
            low = x.reshape(-1, x.shape[-1]) @ stack.a.t()  # (T, sum of ranks)
            low *= stack.mask
            return output.view(-1, output.shape[-1]).addmm_(low, stack.b).view(output.shape)

        return add
