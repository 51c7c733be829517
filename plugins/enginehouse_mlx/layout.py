"""Memory layout of float32 weights on a CPU: by input instead of by output, for faster products.

A linear layer computes ``x @ weight.T`` of a weight of (outputs, inputs). The BLAS that MLX calls reads a second
factor of (inputs, outputs) row by row, but that of a transposed weight column by column: MLX's own BLAS then adds
products one by one, and OpenBLAS transposes the weight in each call. Both add in the same order in either layout, so
results are equal to the last bit. Measured in docs/mlx.md; MLX's own kernels for 16-bit types gain nothing.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

__all__ = ["lay_out_by_input"]


def lay_out_by_input(model: Any) -> None:
    """Store the float32 weights of linear layers and embeddings (often the vocabulary projection) transposed.

    Values and shapes stay the same. Needs memory for one more weight meanwhile.

    Args:
        model: an mlx-lm model, changed in place if its device is a CPU.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.dtype == mx.float32:
            module.weight = mx.contiguous(module.weight.T).T
            mx.eval(module.weight)
