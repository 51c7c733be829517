"""Linear layers whose weights oneDNN has put into the order of its kernels, for float32 on the CPU.

``nn.Linear`` calls MKL with weights in plain order. oneDNN's kernels with prepared weights took two thirds of its time
or less on an AMD EPYC with AVX-512, for 16 to 2,048 rows. A GELU that follows a layer is computed with it, without
another pass over its output. Called when a model is opened. The operations are private to
torch (its compiler uses them), so a result is compared before they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

__all__ = ["prepare_linears", "restore_linears"]

_MAX_ERROR = 1e-4
_ACTIVATION = "intermediate_act_fn"
"""Name in BERT and the many models that follow it."""


class _PreparedLinear(nn.Module):
    """Stands for ``linear``, with ``has_gelu`` also for the GELU after it; keeps no copy of its plain weights."""

    def __init__(self, linear: nn.Linear, *, has_gelu: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Buffers would be copied and cast with the model, which these tensors do not allow.
        self._prepared: Any = (torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None),)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = "gelu" if has_gelu else "none"

    def forward(self, rows: Tensor) -> Tensor:
        """(..., out_features)."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._prepared[0], self._bias, self._activation, [], "none"
        )
        return result


def prepare_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace the linear layers of a model; return what :func:`restore_linears` needs, empty if none was replaced."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    if not _works():
        return replaced
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and not child.weight.is_meta:
                has_gelu = name == "dense" and _has_gelu(parent)
                setattr(parent, name, _PreparedLinear(child, has_gelu=has_gelu))
                replaced.append((parent, name, child))
                if has_gelu:
                    replaced.append((parent, _ACTIVATION, getattr(parent, _ACTIVATION)))
                    setattr(parent, _ACTIVATION, nn.Identity())
    return replaced


def restore_linears(replaced: list[tuple[nn.Module, str, nn.Module]]) -> None:
    """Undo :func:`prepare_linears`."""
    for parent, name, module in replaced:
        setattr(parent, name, module)


def _has_gelu(parent: nn.Module) -> bool:
    """Return True if the module is ``dense`` and then a GELU, as the first half of BERT's feed-forward layer."""
    names = {name for name, _ in parent.named_children()}
    return names == {"dense", _ACTIVATION} and isinstance(getattr(parent, _ACTIVATION), GELUActivation)


def _works() -> bool:
    """Return True if this build of torch has the operations, and they are right."""
    if not torch.backends.mkldnn.is_available():
        return False
    linear = nn.Linear(48, 32)
    rows = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode():
            expected = linear(rows)
            error = (_PreparedLinear(linear)(rows) - expected).abs().max()
            activated = _PreparedLinear(linear, has_gelu=True)(rows)
            error = max(error, (activated - nn.functional.gelu(expected)).abs().max())
    except (RuntimeError, AttributeError, TypeError):
        return False
    return bool(error < _MAX_ERROR)
