"""Recurrent modules of known kinds, as kernels for one token per sequence.

A module is recognised by its parts, and its kernels are used if they give what its own ``forward`` gives. Called by
``mixers.py``; longer spans run in the module itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear

from enginehouse_hf.cuda.delta_step import DeltaNet, delta_step
from enginehouse_hf.recurrent import LayerCache, Mixer

__all__ = ["Pools", "RecurrentPart", "find_part"]

_log = logging.getLogger(__name__)

_NEAR = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Allowed relative difference of outputs and states between kernels and module."""

Pools = Mapping[tuple[str, int], Tensor]
"""States of a layer by kind and number, (num_rows, ...)."""


class RecurrentPart(Protocol):
    """A recurrent module in kernels."""

    def step(self, hidden: Tensor, pools: Pools, sources: Tensor) -> Tensor:
        """Append a token to each sequence.

        Args:
            hidden: (N, hidden_size).
            pools: changed in the rows beside ``sources``.
            sources: (N,) int64, rows that are read.

        Returns:
            (N, hidden_size).
        """
        ...


@frozen(eq=False)
class _DeltaPart:
    """A gated delta net; ``weight`` is the joint projection."""

    weight: Tensor
    net: DeltaNet
    output: Tensor

    def step(self, hidden: Tensor, pools: Pools, sources: Tensor) -> Tensor:
        """See :class:`RecurrentPart`."""
        projected = linear(hidden, self.weight)
        mixed = delta_step(projected, pools["conv", 0], pools["recurrent", 0], sources, self.net)
        return linear(mixed, self.output)


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
        _joined(projections),
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
        module.out_proj.weight.detach(),
    )


_KINDS: tuple[Callable[[Any], RecurrentPart | None], ...] = (_delta_part,)


def find_part(mixer: Mixer, pools: Pools, hidden_size: int) -> RecurrentPart | None:
    """Return the kernels of a module, or None if it is of another kind or they give other numbers.

    Args:
        pools: gives the shapes of the states; not changed.
    """
    part = next((part for kind in _KINDS if (part := kind(mixer.module)) is not None), None)
    if part is None:
        return None
    error = _error(mixer, part, pools, hidden_size)
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


def _error(mixer: Mixer, part: RecurrentPart, pools: Pools, hidden_size: int) -> float:
    """Return the largest relative difference, for two sequences with random states."""
    like = next(mixer.module.parameters())
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=like.device).to(dtype)

    hidden = random(2, hidden_size)
    found = {key: random(4, *pool.shape[1:], dtype=pool.dtype) for key, pool in pools.items()}
    sources = torch.tensor([3, 0], device=like.device)
    cache = LayerCache({key: pool[sources] for key, pool in found.items()})
    expected = mixer.run(hidden[:, None], cache)[:, 0]
    outputs = part.step(hidden, found, sources)
    pairs = [(outputs, expected), *((pool[sources ^ 1], cache.states[key]) for key, pool in found.items())]
    return max(float((one - other.float()).norm() / other.float().norm()) for one, other in pairs)
