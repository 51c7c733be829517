"""Attention of spans longer than one token: flash-attn if installed, else torch's own kernel, or FlashInfer.

None of these has a stable interface for this use, so each is tested numerically and the first correct one is used
(:func:`choose`). If none is, or a layer needs another feature, plain attention per span replaces it. The choice is
reported in the model's metadata.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from enginehouse_hf.cuda.packing import Segment
from enginehouse_hf.facts import Shape

__all__ = ["Kernel", "LongSpans", "SampleStep", "choose", "fits", "span_by_span"]

_log = logging.getLogger(__name__)

_MAX_DIM = 256


class LongSpans(Protocol):
    """The part of a step used by attention of longer spans; see :class:`enginehouse_hf.cuda.step.Step`."""

    num_decodes: int
    segments: list[Segment]
    query_ends: Tensor
    key_ends: Tensor


class Kernel(Protocol):
    """Attention of queries of the longer spans, (T, num_query, D), over all visible places, (num_seen, num_kv, D)."""

    name: str

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, step: LongSpans, scaling: float, window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """(T, num_query, D); causal, each span at the end of its sequence. ``sinks``: (num_query,) or None."""
        ...


def _beside_sinks(attended: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention in which sinks take part, from that without them, (T, num_query, D), which is changed.

    Args:
        lse: (T, num_query) float32, logarithm of the sum of the exponentials of the scores.
        sinks: (num_query,).
    """
    return attended.mul_(torch.sigmoid(lse - sinks)[:, :, None])


def _longest(step: LongSpans) -> tuple[int, int]:
    return max(segment.end - segment.begin for segment in step.segments), max(segment.stop for segment in step.segments)


class _TorchKernel:
    """``aten::_flash_attention_forward``, a private operation of torch."""

    name = "torch's flash attention"

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, step: LongSpans, scaling: float, window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See :class:`Kernel`."""
        result, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, keys, values, step.query_ends, step.key_ends, *_longest(step), 0.0, True, False,
            scale=scaling,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )  # fmt: skip
        return result if sinks is None else _beside_sinks(result, lse.T, sinks)


class _FlashAttnKernel:
    """``flash_attn_varlen_func`` of flash-attn 2, or of its version for Hopper, ``flash_attn_interface``."""

    def __init__(self, module: Any) -> None:
        self.name = f"{module.__name__} {getattr(module, '__version__', '')}".strip()
        self._function = module.flash_attn_varlen_func

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, step: LongSpans, scaling: float, window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See :class:`Kernel`."""
        result: Any = self._function(
            query, keys, values, step.query_ends, step.key_ends, *_longest(step),
            softmax_scale=scaling, causal=True, window_size=(-1, -1) if window is None else (window - 1, 0),
            **({} if sinks is None else {"return_attn_probs": True}),  # the second result is the lse
        )  # fmt: skip
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found if sinks is None else _beside_sinks(found, result[1].T, sinks)


class _FlashInferKernel:
    """FlashInfer's ragged prefill: planned once per step and kind of layer, then run in each layer of that kind.

    A plan stays in pinned memory of its wrapper until the device has copied it, so the next plan waits for that.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.name = f"flashinfer {module.__version__}"
        self._module, self._device = module, device
        self._wrappers: dict[tuple[Any, ...], list[Any]] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, step: LongSpans, scaling: float, window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """See :class:`Kernel`."""
        sizes = query.shape[1], keys.shape[1], query.shape[2]
        kind = (*sizes, scaling, window, query.dtype)
        if kind not in self._wrappers:
            workspace = torch.empty(128 << 20, dtype=torch.uint8, device=self._device)
            wrapper = self._module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
            self._wrappers[kind] = [wrapper, torch.cuda.Event(), None]
        wrapper, is_copied, planned = self._wrappers[kind]
        if planned is not step:
            is_copied.synchronize()
            wrapper.plan(
                *_ends(step), *sizes,
                causal=True, sm_scale=scaling, window_left=-1 if window is None else window - 1,
                q_data_type=query.dtype, kv_data_type=keys.dtype,
            )  # fmt: skip
            is_copied.record()
            self._wrappers[kind][2] = step
        if sinks is None:
            result: Tensor = wrapper.run(query, keys, values)
            return result
        result, lse = wrapper.run(query, keys, values, return_lse=True)
        return _beside_sinks(result, lse * math.log(2), sinks)  # in units of log 2


def _ends(step: LongSpans) -> tuple[Tensor, Tensor]:
    """Ends of spans and of their visible places, in host memory, where plans are made."""
    queries, keys = [0], [0]
    for segment in step.segments:
        queries.append(queries[-1] + segment.end - segment.begin)
        keys.append(keys[-1] + segment.stop)
    return torch.tensor(queries, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32)


def fits(dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """True if these kernels support the head dimensions; all require 16-bit dtypes."""
    return dtype in (torch.bfloat16, torch.float16) and dim == value_dim and dim <= _MAX_DIM and dim % 8 == 0


def choose(
    device: torch.device, dtype: torch.dtype, layers: Iterable[tuple[Shape, Shape]], has_sinks: bool = False
) -> Kernel | None:
    """Return the first kernel that is installed and correct for these shapes of keys and values, or None.

    Args:
        has_sinks: it must be correct with attention sinks, too.
    """
    dims = {keys[1] for keys, values in layers if fits(dtype, keys[1], values[1])}
    if not dims:
        return None
    for make in _candidates(device):
        try:
            kernel = make()
            error = max(_error(kernel, device, dtype, dim, has_sinks) for dim in dims)
        except Exception as reason:  # noqa: BLE001 - libraries compile while they run, and fail in their own ways
            _log.warning("hf: an attention kernel that is installed is not used: %s", reason)
            continue
        if error <= 0.02:
            return kernel
        _log.warning("hf: %s is off by %.2g and not used", kernel.name, error)
    return None


def _candidates(device: torch.device) -> Iterator[Callable[[], Kernel]]:
    for name in ("flash_attn_interface", "flash_attn"):
        if find_spec(name) is not None:
            yield lambda name=name: _FlashAttnKernel(__import__(name))  # type: ignore[misc]
    yield _TorchKernel
    if find_spec("flashinfer") is not None:  # as fast as torch's, but its first use compiles for half a minute
        yield lambda: _FlashInferKernel(__import__("flashinfer"), device)


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, dim: int, has_sinks: bool) -> float:
    """Relative error of a kernel compared to plain attention on ragged spans, windows, grouped heads and sinks."""
    generator = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.randn(num, heads, dim, device=device, dtype=dtype, generator=generator)
        for num, heads in ((106, 4), (191, 2), (191, 2))
    )
    sinks = torch.randn(4, device=device, dtype=dtype, generator=generator) + 2.0 if has_sinks else None
    errors = []
    for window in (None, 16):
        step = SampleStep([Segment(0, 37, 0), Segment(37, 42, 85), Segment(42, 106, 0)], device)
        found = kernel.attend(query, keys, values, step, dim**-0.5, window, sinks).float()
        expected = span_by_span(query.float(), keys.float(), values.float(), step, dim**-0.5, window, None, sinks)
        error = float((found - expected).norm() / expected.norm())
        errors.append(error if error == error else float("inf"))  # noqa: PLR0124 - that is what NaN is
    return max(errors)


class SampleStep:
    """Test spans without a model."""

    num_decodes = 0

    def __init__(self, segments: list[Segment], device: torch.device) -> None:
        self.segments = segments
        self.query_ends, self.key_ends = (ends.to(device) for ends in _ends(self))


def span_by_span(
    query: Tensor, keys: Tensor, values: Tensor, step: LongSpans, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Plain attention, span by span; arguments as for :class:`Kernel`."""
    results, seen = [], 0
    for segment in step.segments:
        begin, end = segment.begin - step.num_decodes, segment.end - step.num_decodes
        parts = query[begin:end], keys[seen : seen + segment.stop], values[seen : seen + segment.stop]
        results.append(_span(segment, *parts, scaling, window, softcap, sinks))
        seen += segment.stop
    return torch.cat(results)


def _span(
    segment: Segment,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one span: query (t, num_query, D) over its whole sequence, (stop, num_kv, D)."""
    at_query = torch.arange(segment.start, segment.stop, device=query.device)[:, None]
    at_key = torch.arange(segment.stop, device=query.device)[None]
    newest = at_query.clamp(min=segment.stop - 1) if segment.sees_ahead else at_query
    mask = at_key <= newest
    if window is not None:
        mask &= at_key > at_query - window
    group = query.shape[1] // keys.shape[1]
    q = query.transpose(0, 1)
    k, v = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))
    if softcap is None and sinks is None:
        result = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None, None], scale=scaling)[0]
    else:
        scores = q @ k.transpose(1, 2) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, len(mask), 1)], -1)
        shares = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
        result = shares[..., : mask.shape[1]] @ v
    return result.transpose(0, 1)
