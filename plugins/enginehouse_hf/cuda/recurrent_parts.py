"""Recurrent modules of known kinds, as kernels.

A module is recognised by its parts, and its kernels are used if they give what its own ``forward`` gives. Called by
``mixers.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear

from enginehouse_hf.cuda.conv_step import conv_step
from enginehouse_hf.cuda.delta_spans import delta_spans
from enginehouse_hf.cuda.delta_step import DeltaNet, delta_step
from enginehouse_hf.cuda.few import project_few
from enginehouse_hf.cuda.mixers import Pools, RecurrentPart, Spans
from enginehouse_hf.cuda.structure import Linear
from enginehouse_hf.cuda.vector import project
from enginehouse_hf.recurrent import LayerCache, Mixer

__all__ = ["find_part"]

_log = logging.getLogger(__name__)

_NEAR = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Allowed relative difference of outputs and states between kernels and module."""


@frozen(eq=False)
class _DeltaPart:
    """A gated delta net; ``weight`` is the joint projection."""

    weight: Linear
    net: DeltaNet
    output: Linear

    def step(self, hidden: Tensor, pools: Pools, rows: Tensor) -> Tensor:
        """See :class:`RecurrentPart`."""
        states = pools["conv", 0], pools["recurrent", 0]
        mixed = _one_by_one(
            _product(hidden, self.weight),
            rows,
            lambda projected, sources, targets: delta_step(projected, *states, sources, targets, self.net),
        )
        few = project_few(mixed, self.output) if len(mixed) > 1 else None
        return _product(mixed, self.output) if few is None else few

    def extend(self, hidden: Tensor, pools: Pools, spans: Spans) -> Tensor:
        """See :class:`RecurrentPart`."""
        projected = _product(hidden, self.weight)
        states = pools["conv", 0], pools["recurrent", 0]
        mixed = delta_spans(projected, *states, spans.sources, spans.targets, spans.ends, spans.longest, self.net)
        return _product(mixed, self.output)


def _one_by_one(projected: Tensor, rows: Tensor, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Call ``step`` for the first token of every sequence, then for the second, and so on; join the results.

    Args:
        projected: (T, width), as the tokens of :meth:`RecurrentPart.step`.
        rows: see there.
    """
    parts = projected.split(rows.shape[1])
    mixed = [step(part, *around) for part, around in zip(parts, pairwise(rows), strict=True)]
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _product(x: Tensor, part: Linear) -> Tensor:
    return project(x, part) if len(x) == 1 else linear(x, part.weight, part.bias)


def _delta_part(module: Any) -> _DeltaPart | None:
    """Return the kernels of Qwen 3.5's and Qwen3-Next's modules."""
    orders = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
    names = next((names for names in orders if all(hasattr(module, name) for name in names)), None)
    needed = (
        "conv1d",
        "A_log",
        "dt_bias",
        "norm",
        "out_proj",
        "num_k_heads",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
    )
    if names is None or not all(hasattr(module, name) for name in needed) or module.conv1d.bias is not None:
        return None
    projections = [getattr(module, name) for name in names]
    if any(type(one) is not nn.Linear or one.bias is not None for one in (*projections, module.out_proj)):
        return None
    return _DeltaPart(
        Linear(_joined(projections)),
        DeltaNet(
            conv=module.conv1d.weight.detach().squeeze(1).contiguous(),
            decay=module.A_log.detach(),
            time_bias=module.dt_bias.detach(),
            norm=module.norm.weight.detach(),
            norm_eps=float(module.norm.variance_epsilon),
            num_keys=module.num_k_heads,
            num_values=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            by_key_head=names == orders[1],
        ),
        _linear(module.out_proj),
    )


@frozen(eq=False)
class _ConvPart:
    """A gated short convolution; ``conv`` is (width, kernel size)."""

    before: Linear
    conv: Tensor
    bias: Tensor | None
    output: Linear

    def step(self, hidden: Tensor, pools: Pools, rows: Tensor) -> Tensor:
        """See :class:`RecurrentPart`."""
        mixed = _one_by_one(
            _product(hidden, self.before),
            rows,
            lambda projected, *around: conv_step(projected, pools["conv", 0], *around, self.conv, self.bias),
        )
        few = project_few(mixed, self.output) if len(mixed) > 1 else None
        return _product(mixed, self.output) if few is None else few

    def extend(self, hidden: Tensor, pools: Pools, spans: Spans) -> None:
        """See :class:`RecurrentPart`."""
        return


def _conv_part(module: Any) -> _ConvPart | None:
    """Return the kernels of LFM2's modules."""
    names = {name for name, _ in module.named_children()}
    if names != {"conv", "in_proj", "out_proj"} or not all(
        type(part) is nn.Linear for part in (module.in_proj, module.out_proj)
    ):
        return None
    bias = module.conv.bias
    return _ConvPart(
        _linear(module.in_proj),
        module.conv.weight.detach().squeeze(1).contiguous(),
        None if bias is None else bias.detach(),
        _linear(module.out_proj),
    )


def _linear(module: nn.Linear) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


_KINDS: tuple[Callable[[Any], RecurrentPart | None], ...] = (_delta_part, _conv_part)


def find_part(mixer: Mixer, pools: Pools, hidden_size: int) -> RecurrentPart | None:
    """Return the kernels of a module, or None if it is of another kind or they give other numbers.

    Args:
        pools: gives the shapes of the states; not changed.
    """
    part = next((part for kind in _KINDS if (part := kind(mixer.module)) is not None), None)
    if part is None:
        return None
    error = max(_step_error(mixer, part, pools, hidden_size), _span_error(mixer, part, pools, hidden_size))
    if error <= _NEAR[next(mixer.module.parameters()).dtype]:
        return part
    _log.warning("hf: the kernels for layer %d are off by %.2g: its own module is used", mixer.layer, error)
    return None


def _joined(modules: list[nn.Linear]) -> Tensor:
    """Join projections; the weights of the modules become views of the result, so that they still work."""
    weight = torch.cat([module.weight.detach() for module in modules])
    for module, own in zip(modules, weight.split([module.out_features for module in modules]), strict=True):
        module.weight = nn.Parameter(own, requires_grad=False)
    return weight


def _step_error(mixer: Mixer, part: RecurrentPart, pools: Pools, hidden_size: int) -> float:
    """Return the largest relative difference, for a token of two sequences with random states."""
    random = _Random(mixer)
    hidden = random(2, hidden_size)
    found = {key: random(4, *pool.shape[1:], dtype=pool.dtype) for key, pool in pools.items()}
    rows = torch.tensor([[3, 0], [2, 1]], device=hidden.device)
    cache = LayerCache({key: pool[rows[0]] for key, pool in found.items()})
    expected = mixer.run(hidden[:, None], cache)[:, 0]
    outputs = part.step(hidden, found, rows)
    outputs = outputs.sum(1) if outputs.dim() == 3 else outputs
    return max(
        _difference(outputs, expected),
        *(_difference(pool[rows[1]], cache.states[key]) for key, pool in found.items()),
    )


def _span_error(mixer: Mixer, part: RecurrentPart, pools: Pools, hidden_size: int) -> float:
    """Return the same for spans of two sequences, one of which has a random state."""
    random, sizes = _Random(mixer), (37, 2)
    hidden = random(sum(sizes), hidden_size)
    found = {key: random(4, *pool.shape[1:], dtype=pool.dtype) for key, pool in pools.items()}
    for pool in found.values():
        pool[2].zero_()
    sources, targets = torch.tensor([[2, 0], [3, 1]], device=hidden.device)
    caches = LayerCache({}), LayerCache({key: pool[:1].clone() for key, pool in found.items()})
    ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=hidden.device)
    spans = Spans(sources, targets, ends, max(sizes))
    outputs = part.extend(hidden, found, spans)
    if outputs is None:
        return 0.0
    expected = [mixer.run(one[None], cache)[0] for one, cache in zip(hidden.split(sizes), caches, strict=True)]
    errors = [_difference(outputs, torch.cat(expected))]
    for key, pool in found.items():
        errors.append(_difference(pool[targets], torch.cat([cache.states[key] for cache in caches])))
    return max(errors)


class _Random:
    """Random numbers of the type of a module, on its device."""

    def __init__(self, mixer: Mixer) -> None:
        self._like = next(mixer.module.parameters())
        self._generator = torch.Generator(self._like.device).manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(shape, generator=self._generator, device=self._like.device)
        return numbers.to(dtype or self._like.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    return error if error == error else float("inf")  # noqa: PLR0124 - that is what NaN is
