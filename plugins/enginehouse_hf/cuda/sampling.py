"""Sampling on the device: changes to logits, the draw, log-probabilities, and a single copy to the host.

Called by the runner, once per step, right after the forward pass; only :meth:`DeviceDrawn.host` waits for the device.
Rows without changes are sampled directly from the model's logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginehouse.contract.backend import (
    DRAW_FIELDS,
    HIGHEST_TEMPERATURE,
    LOWEST_LOGPROB,
    LOWEST_TEMPERATURE,
    Draw,
    Sampled,
)
from enginehouse_hf.cuda.draws import draw_rows

__all__ = ["SUPPORTED", "DeviceDrawn", "DeviceRows", "sample"]

SUPPORTED = DRAW_FIELDS
"""Fields of SamplingParams, and masks, that :func:`sample` supports."""


class DeviceRows:
    """Rows of a forward pass, on the device; valid until the next one.

    Args:
        logits: (num_rows, vocab_size).
        order: (num_rows,) index into ``logits`` of each row; None is the identity.
    """

    def __init__(self, logits: Tensor, order: NDArray[np.int32] | None = None) -> None:
        self.num_rows = int(logits.shape[0]) if order is None else len(order)
        self.logits = logits
        self._order = order

    def host(self) -> NDArray[np.float32]:
        """(num_rows, vocab_size) float32, writable."""
        if self.num_rows < len(self.logits):
            return self.select(range(self.num_rows)).host()
        logits = self.logits.to("cpu", torch.float32, copy=True).numpy()
        rows: NDArray[np.float32] = logits if self._order is None else logits[self._order]
        return rows

    def select(self, rows: Sequence[int]) -> DeviceRows:
        """Select rows."""
        return DeviceRows(self.logits[torch.tensor(self.places(rows), dtype=torch.int64, device=self.logits.device)])

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return the indices into ``logits`` of rows."""
        if self._order is None:
            return list(rows)
        places: list[int] = self._order[list(rows)].tolist()
        return places


class DeviceDrawn:
    """Sampled tokens that are being copied to the host.

    Args:
        parts: tensors on the device: the tokens and, if requested, their log-probabilities, and the ids and
            log-probabilities of the best tokens.
        num_tops: number of best tokens that each draw reports; None reports no log-probabilities.
    """

    def __init__(self, parts: Sequence[Tensor], num_tops: Sequence[int | None]) -> None:
        self._num_tops = num_tops
        self._parts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        for target, part in zip(self._parts, parts, strict=True):
            target.copy_(part, non_blocking=True)
        self._is_copied = torch.cuda.Event()
        self._is_copied.record()

    def host(self) -> Sequence[Sampled]:
        """Wait for the copy; returns one token per draw."""
        self._is_copied.synchronize()
        tokens: list[int] = self._parts[0].tolist()
        if len(self._parts) == 1:
            return [Sampled(token) for token in tokens]
        logprobs, top_ids, top_logprobs = (part.numpy() for part in self._parts[1:])
        return [
            Sampled(token)
            if num_top is None
            else Sampled(token, float(logprobs[i]), top_ids[i, :num_top], top_logprobs[i, :num_top])
            for i, (token, num_top) in enumerate(zip(tokens, self._num_tops, strict=True))
        ]


def sample(output: DeviceRows, draws: Sequence[Draw], last: Tensor) -> DeviceDrawn:
    """Draw one token for each of ``draws``.

    Args:
        output: output of the model; not changed.
        draws: at most one per row.
        last: (num_slots,) int32; each token is written to the slot of its sequence.
    """
    logits = output.logits
    placed = list(zip(output.places([draw.row for draw in draws]), draws, strict=True))
    tokens = draw_rows(_changed(logits, placed), _rules(placed), last)
    num_tops = [draw.sampling.num_logprobs for draw in draws]
    if all(num_top is None for num_top in num_tops):
        return DeviceDrawn([tokens], num_tops)
    return DeviceDrawn([tokens, *_logprobs(logits, placed, tokens)], num_tops)


_Placed = Sequence[tuple[int, Draw]]
"""Draws, each with the index of its row of logits."""


def _rules(placed: _Placed) -> NDArray[np.float64]:
    """(7, num_draws), as required by :func:`draw_rows`."""
    rules = [
        (
            place,
            draw.sequence,
            _bounded(draw.sampling.temperature),
            draw.sampling.top_k,
            draw.sampling.top_p,
            draw.sampling.min_p,
            draw.number,
        )
        for place, draw in placed
    ]
    return np.array(rules, np.float64).T.copy()


def _bounded(temperature: float) -> float:
    return min(max(temperature, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE) if temperature else 0.0


def _changed(logits: Tensor, placed: _Placed) -> Tensor:
    """Return ``logits`` after bias, penalties and masks: unchanged if there are none, else a float32 copy."""
    biased = [(place, draw) for place, draw in placed if draw.bias_ids is not None and len(draw.bias_ids)]
    penalised = [(place, draw) for place, draw in placed if draw.seen_ids is not None and len(draw.seen_ids)]
    masked = [(place, draw) for place, draw in placed if draw.bitmask is not None]
    if not (biased or penalised or masked):
        return logits
    rows = logits.to(torch.float32, copy=True)
    flat, width, device = rows.view(-1), rows.shape[1], rows.device
    if biased:
        cells = _cells([(place, draw.bias_ids) for place, draw in biased], width, device)
        values = np.concatenate([draw.bias_values for _, draw in biased])  # type: ignore[arg-type]
        flat[cells] += _upload(values, device)
    if penalised:
        cells = _cells([(place, draw.seen_ids) for place, draw in penalised], width, device)
        flat[cells] = _penalised(flat[cells], [draw for _, draw in penalised], device)
    if masked:
        _mask(rows, masked)
    return rows


def _penalised(values: Tensor, draws: Sequence[Draw], device: torch.device) -> Tensor:
    """Penalise the logits of seen tokens: first the repetition penalty, then presence and frequency."""
    factors, losses = [], []
    for draw in draws:
        counts, sampling = draw.seen_counts, draw.sampling
        assert counts is not None
        factors.append(np.full(len(counts), sampling.repetition_penalty, np.float32))
        present = np.float32(sampling.presence_penalty) * (counts > 0)
        losses.append((present + np.float32(sampling.frequency_penalty) * counts).astype(np.float32))
    factor, loss = _upload(np.concatenate(factors), device), _upload(np.concatenate(losses), device)
    return torch.where(values > 0, values / factor, values * factor) - loss


def _mask(rows: Tensor, placed: _Placed) -> None:
    """Set the logits of forbidden tokens to -inf, in place."""
    device, width = rows.device, rows.shape[1]
    words = _upload(np.stack([draw.bitmask for _, draw in placed]), device)  # type: ignore[arg-type]
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    forbidden = bits.view(len(placed), -1)[:, :width] == 0
    index = _upload(np.array([place for place, _ in placed]), device)
    rows[index] = rows[index].masked_fill(forbidden, float("-inf"))


def _logprobs(logits: Tensor, placed: _Placed, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Raw log-probabilities of the drawn tokens, and the best tokens of each row with their log-probabilities."""
    num_top = max(draw.sampling.num_logprobs or 0 for _, draw in placed)
    raw = logits[_upload(np.array([place for place, _ in placed]), logits.device)].float()
    normalisers = raw.double().logsumexp(1, keepdim=True)
    chosen = raw.gather(1, tokens.clamp_min(0).long()[:, None]).double() - normalisers
    values, ids = raw.topk(num_top, 1) if num_top else (raw[:, :0], tokens[:, None][:, :0].long())
    best = (values.double() - normalisers).clamp(max=0.0)
    return chosen[:, 0].clamp(LOWEST_LOGPROB, 0.0), ids, best


def _cells(parts: Sequence[tuple[int, NDArray[np.int64] | None]], width: int, device: torch.device) -> Tensor:
    """Return indices into the flattened rows, without duplicates."""
    return _upload(np.concatenate([row * width + ids for row, ids in parts if ids is not None]), device)


def _upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Start an asynchronous copy to the device."""
    tensor: Tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True)
