"""From the states of tokens to one row per text: pooling, then the modules that a model's folder lists.

Called by the pooler with the states of one pass. Every step treats each text by itself, in float32 where sums are made.

Source: the definitions of the modules of sentence-transformers 6.2, for texts without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.pooling.packing import PackedTexts
from enginehouse_hf.pooling.recipe import Dense, LayerNorm, Module, Pooling

__all__ = ["RowSteps", "dense_layers"]


class RowSteps:
    """The modules of a recipe, with their weights."""

    def __init__(self, modules: Sequence[Module], layers: Sequence[nn.Module | None], truncate_dim: int | None) -> None:
        self._steps = [(module, layer) for module, layer in zip(modules, layers, strict=True)]
        self._truncate_dim = truncate_dim

    def run(self, states: Tensor, texts: PackedTexts) -> Tensor:
        """(n, dimensions) float32 from the states of all tokens, (T, hidden_size)."""
        rows = states
        for module, layer in self._steps:
            if isinstance(module, Pooling):
                rows = _pool(rows, texts, module)
            elif layer is not None:
                rows = layer(rows)
            else:
                rows = nn.functional.normalize(rows.float(), dim=-1)
        return rows[:, : self._truncate_dim].float()


def _pool(states: Tensor, texts: PackedTexts, pooling: Pooling) -> Tensor:
    """(n, modes x hidden_size). A text that is all prompt keeps its tokens."""
    device = states.device
    lengths = torch.tensor(texts.lengths)
    prompts = torch.zeros_like(lengths) if pooling.include_prompt else torch.tensor(texts.prompts)
    prompts = torch.where(prompts < lengths, prompts, 0)
    begins = (lengths.cumsum(0) - lengths + prompts).to(device)
    kept, lengths = states, lengths.to(device)
    positions = texts.positions
    if bool(prompts.any()):
        chosen = positions >= prompts.to(device).repeat_interleave(lengths)
        kept, positions, lengths = states[chosen], positions[chosen], lengths - prompts.to(device)
    parts = [_MODES[mode](states, kept, positions, begins, lengths) for mode in pooling.modes]
    return torch.cat([part.to(states.dtype) for part in parts], dim=-1)


def _first(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    return states[begins]


def _last(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    return kept[lengths.cumsum(0) - 1]


def _largest(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(kept.float(), "max", lengths=lengths)


def _mean(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(kept.float(), "sum", lengths=lengths) / lengths[:, None]


def _mean_sqrt(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(kept.float(), "sum", lengths=lengths) / lengths[:, None].sqrt()


def _weighted_mean(states: Tensor, kept: Tensor, positions: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
    """Weights grow with the position in the text, from 1 on; a prompt that is left out counts as positions."""
    weights = (positions + 1).float()[:, None]
    total = torch.segment_reduce(kept.float() * weights, "sum", lengths=lengths)
    return total / torch.segment_reduce(weights, "sum", lengths=lengths)


_MODES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""By name; each takes all states (T, D), those that count with their positions and, per text, the column of its first
token that counts and their number; it returns (n, D)."""


def dense_layers(modules: Sequence[Module], *, trusts_pickles: bool) -> list[nn.Module | None]:
    """Return the layer with weights of each module, None for one without.

    Raises:
        ModelLoadError: weights are missing or do not fit, or an activation is not a layer of torch.
    """
    return [_layer(module, trusts_pickles=trusts_pickles) for module in modules]


def _layer(module: Module, *, trusts_pickles: bool) -> nn.Module | None:
    layer: nn.Module
    if isinstance(module, Dense):
        layer = _DenseLayer(module)
    elif isinstance(module, LayerNorm):
        layer = nn.ModuleDict({"norm": nn.LayerNorm(module.dimension)})
    else:
        return None
    weights = _read_weights(module.folder, trusts_pickles=trusts_pickles)
    try:
        layer.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelLoadError(f"{module.folder}: its weights do not fit its config.json: {error}") from error
    return layer if isinstance(module, Dense) else layer["norm"]  # type: ignore[index]


class _DenseLayer(nn.Module):
    def __init__(self, dense: Dense) -> None:
        super().__init__()
        kind = getattr(nn, dense.activation, None)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ModelLoadError(f"{dense.folder}: torch.nn has no activation {dense.activation[:40]!r}")
        try:
            self.activation = kind()
        except TypeError as error:
            raise ModelLoadError(f"{dense.folder}: {dense.activation[:40]!r} is not an activation") from error
        self.linear = nn.Linear(dense.in_features, dense.out_features, bias=dense.has_bias)
        self.has_residual = dense.has_residual
        if dense.has_residual and dense.in_features != dense.out_features:
            self.residual = nn.Linear(dense.in_features, dense.out_features, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, out_features)."""
        rows = rows.to(self.linear.weight.dtype)
        result: Tensor = self.activation(self.linear(rows))
        if not self.has_residual:
            return result
        residual = getattr(self, "residual", None)
        return result + (rows if residual is None else residual(rows))


def _read_weights(folder: Path, *, trusts_pickles: bool) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415 - most models have no such modules

    file, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if file.is_file():
        return dict(load_file(file))
    if pickled.is_file() and trusts_pickles:
        return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    if pickled.is_file():
        raise ModelLoadError(
            f"{pickled} is a pickle; convert it to safetensors, or set trust_remote_code = true if you trust its author"
        )
    raise ModelLoadError(f"{folder}: it has no model.safetensors")
