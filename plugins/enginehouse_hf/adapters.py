"""Adapters (LoRA) of PEFT's folders on transformers models: stacked low-rank updates, all of a pass at once.

A forward hook of each adapted linear layer adds ``B (mask * (A x))``, where A and B are the halves of all adapters of
the pass, joined along their ranks, and the mask has each token's scales. So a pass has two further products per layer,
for any number of adapters. Used by the runner for the CPU; peft is not needed.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint for the files; scales from ``LoraLayer`` of peft.
"""

from __future__ import annotations

import json
import math
import re
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

__all__ = ["Adapters", "read_peft_folder"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_RANK = 1024

_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings of PEFT with the values that mean plain LoRA; all others change what the weights mean."""


@frozen(eq=False)
class _Halves:
    """The weights of one adapter for one layer: (rank, inputs) and (outputs, rank); B has the adapter's own scale."""

    a: Tensor
    b: Tensor


@frozen
class _Ranks:
    """Rank and alpha of the layers of an adapter."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    is_rank_stabilised: bool

    def of(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a layer."""
        rank, alpha = _matched(self.rank_pattern, module, self.rank), _matched(self.alpha_pattern, module, self.alpha)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"the rank of {module} is {rank!r}, 1 to {_MAX_RANK} was expected")
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"lora_alpha of {module} is {alpha!r}, a number was expected")
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _matched(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
    for pattern, value in patterns.items():
        if len(pattern) <= 200 and re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


def read_peft_folder(folder: Path, linears: Mapping[str, nn.Linear]) -> dict[str, _Halves]:
    """Return the halves of each layer that an adapter changes, by the name of the layer.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        linears: the linear layers of the model that can be adapted, by name.

    Raises:
        AdapterRefused: names the folder, and what is wrong.
    """
    try:
        ranks = _read_config(folder / _CONFIG)
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{_WEIGHTS} is missing; pickled weights are not read")
        return _pair(load_file(folder / _WEIGHTS), ranks, linears)
    except OSError as error:
        raise AdapterRefused(f"{folder.name}: cannot be read: {error.strerror}", "adapters") from error
    except (SafetensorError, ValueError, RecursionError, re.error) as error:
        raise AdapterRefused(f"{folder.name}: {error}", "adapters") from error


def _read_config(path: Path) -> _Ranks:
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{_CONFIG} is missing or has more than {_MAX_CONFIG_BYTES} bytes")
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type in {_CONFIG} is not LORA")
    for name, allowed in _OFF.items():
        if not any(config.get(name) == value and type(config.get(name)) is type(value) for value in allowed):
            raise ValueError(f"{name} = {config[name]!r} is not supported; only plain LoRA is")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise ValueError("rank_pattern and alpha_pattern must be objects")
    is_stabilised = config.get("use_rslora") is True
    return _Ranks(config.get("r", 8), config.get("lora_alpha", 8), patterns[0], patterns[1], is_stabilised)


def _pair(tensors: Mapping[str, Tensor], ranks: _Ranks, linears: Mapping[str, nn.Linear]) -> dict[str, _Halves]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"the tensor {name!r} is not of plain LoRA")
        if match["module"] not in linears:
            raise ValueError(f"{match['module']!r} is not a linear layer of this model that can be adapted")
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} has numbers that are not finite, or of the type {tensor.dtype}")
        found.setdefault(match["module"], {})[match["half"]] = tensor
    if not found:
        raise ValueError(f"{_WEIGHTS} has no tensors")
    made = {}
    for module, halves in found.items():
        rank, scale = ranks.of(module)
        linear = linears[module]
        if set(halves) != {"A", "B"}:
            raise ValueError(f"{module} has only one of lora_A and lora_B")
        wanted = ((rank, linear.in_features), (linear.out_features, rank))
        shapes = tuple(halves["A"].shape), tuple(halves["B"].shape)
        if shapes != wanted:
            raise ValueError(f"{module}: the shapes are {shapes}, {wanted} was expected")
        form = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        made[module] = _Halves(halves["A"].to(**form), (scale * halves["B"].float()).to(**form))
    return made


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
        output, text = model.get_output_embeddings(), set(model.get_decoder().modules())
        self._linears: dict[str, nn.Linear] = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module in text and module is not output and ".experts." not in name
            if not any(name.startswith(f"{other}.") for other in recurrent)
        }
        self._loaded: dict[int, dict[str, _Halves]] = {}
        self._next = 1
        self._hooks: dict[str, Any] = {}
        self._joined: tuple[tuple[int, ...], dict[str, tuple[Tensor, Tensor, tuple[int, ...]]]] = ((), {})
        self._now: dict[str, _Stack] = {}

    def load(self, path: Path) -> int:
        """Load a folder; return its handle. Raises AdapterRefused."""
        halves = read_peft_folder(path, self._linears)
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
