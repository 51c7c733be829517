"""Linear layers whose weights oneDNN has put into the order of its kernels, for float32 on the CPU.

``nn.Linear`` calls MKL with weights in plain order. oneDNN's kernels with prepared weights took two thirds of its time
or less on an AMD EPYC with AVX-512, for 16 to 2,048 rows. Called when a model is opened; callers compare the numbers of
the whole model before and after. The operations are private to torch (its compiler uses them), so a result is compared
before they are used.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PreparedLinear", "Replaced", "is_supported", "prepare_linears", "restore"]

_MAX_ERROR = 1e-4

Replaced = list[tuple[nn.Module, str, nn.Module]]
"""Modules that were replaced: their parent, their name there, and the module; for a linear layer that in its place."""


class PreparedLinear(nn.Module):
    """Replacement of ``linear`` for float32 on the CPU; keeps no copy of its weights in plain order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Buffers would be copied and cast with the model, which these tensors do not allow.
        self._prepared: Any = (torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None),)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def plain(self) -> nn.Linear:
        """Return the layer that was replaced, with a new copy of its weights: the same to the bit."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self._bias is not None, device="meta")
        linear.weight = nn.Parameter(self._prepared[0].to_dense(), requires_grad=False)
        if self._bias is not None:
            linear.bias = nn.Parameter(self._bias, requires_grad=False)
        return linear

    def forward(self, rows: Tensor) -> Tensor:
        """(..., out_features)."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._prepared[0], self._bias, "none", [], "")
        return result

    def with_gelu(self, rows: Tensor) -> Tensor:
        """(..., out_features), the exact GELU of the product, without another pass over it."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._prepared[0], self._bias, "gelu", [], "none")
        return result

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """(..., out_features), the sum of the product and ``other``."""
        add = torch.ops.mkldnn._linear_pointwise.binary
        result: Tensor = add(rows, other, self._prepared[0], self._bias, "add")
        return result


def prepare_linears(model: nn.Module, others: Collection[nn.Module] = (), *, only: nn.Module | None = None) -> Replaced:
    """Replace the linear layers of a model one by one, so that only one at a time is in memory twice.

    Layers of other types or devices, quantised ones and those of subclasses stay as they are.

    Args:
        others: modules that stay as they are, with all of theirs.
        only: the only layer to replace.

    Returns:
        What :func:`restore` needs; empty if none was replaced.
    """
    if not is_supported():
        return []
    excluded = {module for other in others for module in other.modules()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a layer that several modules share stays one layer
    for parent in model.modules():
        for name, child in parent._modules.items():
            if parent not in excluded and child not in excluded and only in (None, child) and _is_known(child):
                places.setdefault(id(child), []).append((parent, name))
    replaced: Replaced = []
    for shared in places.values():
        prepared = PreparedLinear(getattr(*shared[0]))
        for parent, name in shared:
            setattr(parent, name, prepared)
        replaced += [(parent, name, prepared) for parent, name in shared]
    return replaced


def _is_known(module: nn.Module | None) -> bool:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:  # quantised ones have other tensors
        return False
    return module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"


def restore(replaced: Replaced) -> None:
    """Give the parents their former modules back, linear layers one by one from their prepared weights."""
    plain: dict[nn.Module, nn.Module] = {}
    for parent, name, module in replaced:
        if isinstance(module, PreparedLinear) and module not in plain:
            plain[module] = module.plain()
        setattr(parent, name, plain.get(module, module))


@cache
def is_supported() -> bool:
    """Return True if this build of torch has the operations, and they are right."""
    if not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(48, 32)
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode():
            prepared, expected = PreparedLinear(linear), linear(rows)
            error = (prepared(rows) - expected).abs().max()
            error = max(error, (prepared.with_gelu(rows) - nn.functional.gelu(expected)).abs().max())
            error = max(error, (prepared.plus(rows, expected) - 2 * expected).abs().max())
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool(error < _MAX_ERROR)
