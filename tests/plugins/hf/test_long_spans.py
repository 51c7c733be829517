"""Which attention kernel longer spans get: whatever is installed is tried on numbers first.

The libraries themselves need a GPU; here modules stand in for them that take the same calls and compute on the CPU.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from enginehouse_hf.cuda import long_spans
from enginehouse_hf.cuda.packing import Segment

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.hf

_CPU = torch.device("cpu")
_LAYERS = [((2, 64), (2, 64))]


def _attend(  # noqa: PLR0917
    query: Any, keys: Any, values: Any, ends: Any, key_ends: Any, scale: float, left: int, factor: float
) -> tuple[Any, Any]:
    """Ragged causal attention, written otherwise than the plugin's: repeated heads, float64.

    Returns:
        (T, num_query, D), and the logarithm of the sum of the exponentials of the scores, (num_query, T) float32.
    """
    results, sums = [], []
    for begin, end, low, high in zip(ends, ends[1:], key_ends, key_ends[1:], strict=False):
        group = query.shape[1] // keys.shape[1]
        q = query[begin:end].double()
        k, v = (part[low:high].double().repeat_interleave(group, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        distance = torch.arange(high - low)[None] - torch.arange(high - low - (end - begin), high - low)[:, None]
        scores = scores.masked_fill(distance > 0, float("-inf"))
        if left >= 0:
            scores = scores.masked_fill(distance < -left, float("-inf"))
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(results).to(query.dtype) * factor, torch.cat(sums, 1).float()


def _flash_attn(name: str, factor: float, gives_lse: bool = True) -> ModuleType:
    module = ModuleType(name)

    def flash_attn_varlen_func(  # noqa: PLR0917 - as theirs
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, *,
        softmax_scale: float, causal: bool, window_size: tuple[int, int], **more: bool,
    ) -> Any:  # fmt: skip
        assert causal
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        result, lse = _attend(q, k, v, *ends, softmax_scale, window_size[0], factor)
        assert more in ({}, {"return_attn_probs": True})
        return (result, lse, None) if gives_lse and more else result

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    return module


class _Wrapper:
    """As much of FlashInfer's wrapper as is used."""

    num_plans = 0

    def __init__(self, workspace: Any, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, qo_indptr: Any, kv_indptr: Any, *_sizes: int, causal: bool, sm_scale: float, window_left: int,
             q_data_type: Any, kv_data_type: Any) -> None:  # fmt: skip
        assert causal
        assert q_data_type == kv_data_type
        type(self).num_plans += 1
        self._planned = qo_indptr.tolist(), kv_indptr.tolist(), sm_scale, window_left

    def run(self, query: Any, keys: Any, values: Any, return_lse: bool = False) -> Any:
        result, lse = _attend(query, keys, values, *self._planned, 1.0)
        return (result, lse.T / math.log(2)) if return_lse else result


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    installed = {module.__name__: module for module in modules}
    for name in ("flashinfer", "flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, installed.get(name))
    monkeypatch.setattr(long_spans, "find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)


def test_what_is_installed_and_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _flash_attn("flash_attn", 1.0))
    kernel = long_spans.choose(_CPU, torch.bfloat16, _LAYERS)

    assert kernel is not None
    assert kernel.name == "flash_attn 9.9"


def test_the_form_for_hopper_comes_before_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _flash_attn("flash_attn", 1.0), _flash_attn("flash_attn_interface", 1.0))
    kernel = long_spans.choose(_CPU, torch.float16, _LAYERS)

    assert kernel is not None
    assert kernel.name == "flash_attn_interface 9.9"


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_what_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float
) -> None:
    """Nor is what raises; what comes next is."""
    broken = ModuleType("flash_attn_interface")
    _install(monkeypatch, broken, _flash_attn("flash_attn", factor))
    kernel = long_spans.choose(_CPU, torch.bfloat16, _LAYERS)

    assert kernel is None or kernel.name == "torch's flash attention"
    assert "flash_attn 9.9 is off by" in caplog.text
    assert "is not used: module 'flash_attn_interface' has no attribute" in caplog.text


def test_flashinfer_plans_once_per_step_and_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = _Wrapper  # type: ignore[attr-defined]
    module.__version__ = "0.5"  # type: ignore[attr-defined]
    _install(monkeypatch, module)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    kernel = long_spans.choose(_CPU, torch.bfloat16, _LAYERS)
    assert kernel is not None
    assert kernel.name == "flashinfer 0.5"

    _Wrapper.num_plans = 0
    for _ in range(2):
        step = long_spans.SampleStep([Segment(0, 9, 3)], _CPU)
        query, keys, values = (torch.randn(n, h, 64, dtype=torch.bfloat16) for n, h in ((9, 4), (12, 2), (12, 2)))
        for window in (None, 4, None, 4):
            found = kernel.attend(query, keys, values, step, 0.125, window, None)
            expected = long_spans.span_by_span(query, keys, values, step, 0.125, window, None, None)
            assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    assert _Wrapper.num_plans == 4


@pytest.mark.parametrize("window", [None, 4])
def test_sinks_take_a_share_of_the_softmax(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """In plain attention and beside each library, whose results do not know of them."""
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper = _Wrapper  # type: ignore[attr-defined]
    flashinfer.__version__ = "0.5"  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    step = long_spans.SampleStep([Segment(0, 9, 3)], _CPU)
    query, keys, values = (torch.randn(n, h, 64, dtype=torch.bfloat16) for n, h in ((9, 4), (12, 2), (12, 2)))
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    more = torch.cat([keys, torch.zeros_like(keys[:1])]), torch.cat([values, torch.zeros_like(values[:1])])
    k, v = (part.float().repeat_interleave(2, 1) for part in more)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * 0.125
    age = torch.arange(3, 12)[:, None] - torch.arange(13)[None]
    scores = scores.masked_fill((age < 0) | (age >= (window or 12)), float("-inf"))
    scores[:, :, 12] = sinks[:, None]  # the key past the end
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    plain = long_spans.span_by_span(query, keys, values, step, 0.125, window, None, sinks)
    assert (plain.float() - expected).norm() < 0.02 * expected.norm()
    for module in (flashinfer, _flash_attn("flash_attn", 1.0)):
        _install(monkeypatch, module)
        kernel = long_spans.choose(_CPU, torch.bfloat16, _LAYERS, has_sinks=True)
        assert kernel is not None
        assert kernel.name.startswith(module.__name__)
        found = kernel.attend(query, keys, values, step, 0.125, window, sinks)
        assert (found.float() - expected).norm() < 0.02 * expected.norm()


def test_a_kernel_that_gives_no_sums_is_not_used_for_sinks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, _flash_attn("flash_attn", 1.0, gives_lse=False))
    without, kernel = (long_spans.choose(_CPU, torch.bfloat16, _LAYERS, has_sinks) for has_sinks in (False, True))

    assert without is not None
    assert without.name == "flash_attn 9.9"
    assert kernel is None or kernel.name == "torch's flash attention"
    assert "an attention kernel that is installed is not used" in caplog.text


def test_nothing_is_tried_where_it_could_not_be_used() -> None:
    for dtype, layers in ((torch.float32, _LAYERS), (torch.bfloat16, [((2, 64), (2, 32))]), (torch.bfloat16, [])):
        assert long_spans.choose(_CPU, dtype, layers) is None


@pytest.mark.parametrize("window", [None, 4])
def test_tokens_of_an_image_attend_to_each_other(window: int | None) -> None:
    """Not those of other spans; a window hides old keys, and none that come later."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(size, 2, 16, generator=generator) for size in (9, 12, 12))
    step = long_spans.SampleStep([Segment(0, 6, 3, sees_ahead=True), Segment(6, 9, 0)], _CPU)
    found = long_spans.span_by_span(query, keys, values, step, 0.25, window, None, None)
    scores = torch.einsum("qhd,khd->hqk", query[:6], keys[:9]) * 0.25
    age = torch.arange(3, 9)[:, None] - torch.arange(9)[None]
    shares = scores.masked_fill(age >= (window or 9), float("-inf")).softmax(-1)

    assert torch.allclose(found[:6], torch.einsum("hqk,khd->qhd", shares, values[:9]), atol=1e-5)
    alone = long_spans.SampleStep([Segment(0, 3, 0)], _CPU)
    causal = long_spans.span_by_span(query[6:], keys[9:], values[9:], alone, 0.25, window, None, None)
    assert torch.allclose(found[6:], causal, atol=1e-5)
