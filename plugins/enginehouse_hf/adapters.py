"""Adapters (LoRA) of PEFT's folders on transformers models: stacked low-rank updates, all of a pass at once.

A forward hook of each adapted linear layer adds ``scale * B (A x)`` to the rows of each adapter's tokens. These are
neighbours (:meth:`Adapters.order`), so that adapters with equally many tokens are one batched product with A for all
layers that read the same input, and one with B for each layer, without copies of the rows.
Used by the runner for the CPU; that for CUDA (``cuda/stacks.py``) reads folders with it. peft is not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby
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
from enginehouse_hf.linears import PreparedLinear

__all__ = ["Adapters", "Halves", "LayerForm", "adaptable_linears", "read_peft_folder"]

_TYPES = (torch.float32, torch.float16, torch.bfloat16)

_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Layers that read the input of another layer of their module."""


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
    """Halves of k adapters for the layers that read one input, ranks filled up with zeros.

    Attributes:
        a: (k, inputs, ranks of all layers side by side): one product serves them all.
        b: of each layer that one of the adapters changes: the place of its first rank in ``a``, and (k, rank, outputs).
    """

    a: Tensor
    b: Mapping[str, tuple[int, Tensor]]

    @classmethod
    def of(cls, adapters: Sequence[Mapping[str, Halves]]) -> _Stack:
        """Join adapters; each has its changes of layers with one input, by name."""
        known = {name: halves for adapter in adapters for name, halves in adapter.items()}
        ranks = {name: max(len(one[name].a) for one in adapters if name in one) for name in known}
        some = next(iter(known.values())).a
        a, b, first = some.new_zeros(len(adapters), some.shape[1], sum(ranks.values())), {}, 0
        for name, rank in ranks.items():
            b[name] = first, some.new_zeros(len(adapters), rank, len(known[name].b))
            for place, halves in enumerate(one.get(name) for one in adapters):
                if halves is not None:
                    a[place, :, first : first + len(halves.a)] = halves.a.t()
                    b[name][1][place, : len(halves.a)] = halves.b.t()
            first += rank
        return cls(a, b)

    def part(self, begin: int, end: int) -> _Stack:
        """Return some of the adapters, as views."""
        return _Stack(self.a[begin:end], {name: (first, b[begin:end]) for name, (first, b) in self.b.items()})

    def halves(self) -> dict[str, Halves]:
        """Return the halves of each layer, as views; of a stack of one adapter."""
        return {name: Halves(self.a[0, :, at : at + b.shape[1]].t(), b[0].t()) for name, (at, b) in self.b.items()}


_Stacks = Mapping[str, _Stack]
"""Stacks by the name of the first layer that reads their input."""


@define(eq=False)
class _Group:
    """Neighbouring tokens of a pass: equally many of each of k adapters.

    Attributes:
        rows: None if these are all tokens of the pass.
        shape: k, number of tokens of each.
        scales: (k, size, 1); None if all are 1.
    """

    rows: slice | None
    shape: tuple[int, int]
    scales: Tensor | None
    stacks: _Stacks
    _seen: tuple[Tensor, _Stack] | None = None
    _low: Tensor | None = None

    def add(self, first: str, name: str, x: Tensor, output: Tensor) -> None:
        """Add the update of a layer to ``output``, (..., outputs), in place; ``x`` is (..., inputs)."""
        stack = self.stacks.get(first)
        if stack is None or name not in stack.b:
            return
        first_rank, b = stack.b[name]
        low = self._lowered(stack, x)
        if len(stack.b) > 1:
            low = low.narrow(2, first_rank, b.shape[1])
        self._chosen(output).baddbmm_(low, b)

    def _lowered(self, stack: _Stack, x: Tensor) -> Tensor:
        """Return the products with A, (k, size, ranks): those of before for the next layer with the same input."""
        if self._low is None or self._seen is None or self._seen[0] is not x or self._seen[1] is not stack:
            self._low = torch.bmm(self._chosen(x.contiguous()), stack.a)
            if self.scales is not None:
                self._low *= self.scales.to(x.device)
            self._seen = x, stack
        return self._low

    def _chosen(self, tokens: Tensor) -> Tensor:
        """Return the rows of the group as a view, (k, size, width)."""
        if self.rows is not None:
            tokens = tokens.view(-1, tokens.shape[-1])[self.rows]
        return tokens.view(*self.shape, tokens.shape[-1])


@frozen
class _Use:
    """Neighbouring tokens of a pass that use an adapter: the place of the first of them, and the scale of each."""

    handle: int
    begin: int
    scales: tuple[float, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.scales)


def _uses(spans: Sequence[tuple[AdapterSet, int]]) -> list[_Use]:
    """Return the uses of the first adapters of all sets, then those of the second ones, and so on."""
    found: list[_Use] = []
    begins = [0, *accumulate(size for _, size in spans)]
    used = [[pair for pair in adapters if pair[1]] for adapters, _ in spans]
    for number in range(max(map(len, used), default=0)):
        for adapters, begin, (_, size) in zip(used, begins, spans, strict=False):
            if number < len(adapters):
                handle, scale = adapters[number]
                one = _Use(handle, begin, (scale,) * size)
                if found and (found[-1].handle, found[-1].end) == (handle, begin):
                    one = _Use(handle, found[-1].begin, found.pop().scales + one.scales)
                found.append(one)
    return found


def _runs(uses: Sequence[_Use]) -> list[list[_Use]]:
    """Divide uses where the next one has other tokens than those that follow, or another number of them."""
    runs: list[list[_Use]] = []
    for use in uses:
        last = runs[-1][-1] if runs else None
        if last is None or (last.end, len(last.scales)) != (use.begin, len(use.scales)):
            runs.append([])
        runs[-1].append(use)
    return runs


def _first_of_input(linears: Mapping[str, nn.Linear | PreparedLinear]) -> dict[str, str]:
    """Return for each layer the name of the first one that reads the same input."""
    firsts: dict[tuple[str, str, int], str] = {}
    found = {}
    for name, linear in linears.items():
        parent, _, own = name.rpartition(".")
        found[name] = firsts.setdefault((parent, _SAME_INPUT.get(own, own), linear.in_features), name)
    return found


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
        self._first = _first_of_input(self._linears)
        self._device = model.device
        self._loaded: dict[int, _Stacks] = {}
        self._next = 1
        self._hooks: dict[str, Any] = {}
        self._joined: tuple[tuple[int, ...], _Stacks] = (), {}
        self._parts: dict[tuple[int, ...], _Stacks] = {}
        self._groups: list[_Group] = []
        self._num_tokens = 0

    def load(self, path: Path) -> int:
        """Load a folder; return its handle. Raises AdapterRefused."""
        halves = read_peft_folder(path, {name: LayerForm.of(linear) for name, linear in self._linears.items()})
        by_input: dict[str, dict[str, Halves]] = {}
        for name in halves:
            by_input.setdefault(self._first[name], {})[name] = halves[name]
            if name not in self._hooks:
                self._hooks[name] = self._linears[name].register_forward_hook(self._hook(name))
        handle, self._next = self._next, self._next + 1
        self._loaded[handle] = {first: _Stack.of([layers]) for first, layers in by_input.items()}
        return handle

    def unload(self, adapter: int) -> None:
        """Free an adapter, and the hooks that no other one needs."""
        del self._loaded[adapter]
        self._groups, self._parts = [], {}
        if adapter in self._joined[0]:
            self._joined = (), {}
        needed = {name for stacks in self._loaded.values() for stack in stacks.values() for name in stack.b}
        for name in self._hooks.keys() - needed:
            self._hooks.pop(name).remove()

    def check(self, adapters: AdapterSet) -> None:
        """Raise InvalidSpan if one of a set is not loaded."""
        for handle, _ in adapters:
            if handle not in self._loaded:
                raise InvalidSpan(f"adapter {handle} is not loaded")

    def order(self, spans: Sequence[tuple[AdapterSet, int]]) -> list[int]:
        """Return the order in which spans, with their numbers of tokens, make the fewest groups in :meth:`begin`.

        Those of an adapter become neighbours, and adapters with equally many tokens, too.
        """
        used = [tuple(handle for handle, scale in adapters if scale) for adapters, _ in spans]
        sizes = Counter[tuple[int, ...]]()
        for handles, (_, size) in zip(used, spans, strict=True):
            sizes[handles] += size
        return sorted(range(len(spans)), key=lambda index: (used[index] != (), sizes[used[index]], used[index]))

    def begin(self, spans: Sequence[tuple[AdapterSet, int]]) -> None:
        """Prepare a pass over spans with these adapters and numbers of tokens, which follow each other."""
        self._num_tokens = sum(size for _, size in spans)
        runs = _runs(_uses(spans))
        self._join({use.handle for run in runs if len(run) > 1 for use in run})
        places = {handle: place for place, handle in enumerate(self._joined[0])}
        self._groups = []
        for run in runs:  # adapters that are not neighbours in the joined stacks are groups of their own
            numbered = groupby(enumerate(run), key=lambda one: places.get(one[1].handle, 0) - one[0])
            self._groups += [self._group([use for _, use in part]) for _, part in numbered]

    def _group(self, uses: Sequence[_Use]) -> _Group:
        size, scales = len(uses[0].scales), [scale for use in uses for scale in use.scales]
        rows = slice(uses[0].begin, uses[0].begin + len(scales))
        shape = len(uses), size
        return _Group(
            None if len(scales) == self._num_tokens else rows,
            shape,
            None if set(scales) == {1.0} else torch.tensor(scales, device=self._device).view(*shape, 1),
            self._stacks_of(tuple(use.handle for use in uses)),
        )

    def _stacks_of(self, handles: tuple[int, ...]) -> _Stacks:
        if len(handles) == 1:
            return self._loaded[handles[0]]
        if handles not in self._parts:
            begin = self._joined[0].index(handles[0])
            stacks = {first: stack.part(begin, begin + len(handles)) for first, stack in self._joined[1].items()}
            self._parts[handles] = stacks
        return self._parts[handles]

    def _join(self, handles: Collection[int]) -> None:
        """Join the stacks of adapters, unless they are; joined ones are kept until others are needed."""
        if set(handles) <= set(self._joined[0]):
            return
        self._joined, self._parts = ((), {}), {}
        loaded = [self._loaded[handle] for handle in sorted(handles)]
        stacks = {
            first: _Stack.of([one[first].halves() if first in one else {} for one in loaded])
            for first in dict.fromkeys(first for one in loaded for first in one)
        }
        self._joined = tuple(sorted(handles)), stacks

    def _hook(self, name: str) -> Any:
        first = self._first[name]

        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self._groups:
                return
            x = inputs[0]
            assert x.numel() == self._num_tokens * x.shape[-1], f"{name} does not see the tokens of the pass in order"
            for group in self._groups:
                group.add(first, name, x, output)

        return add
