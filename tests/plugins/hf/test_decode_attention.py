"""The kernel for single tokens beside plain attention in float64: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # the interpreter's, where a sink has the whole share
    pytest.mark.skipif(
        _DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
]

_NUM_QUERY, _NUM_KV, _SCALE = 6, 2, 0.3
_LENGTHS = (1, 3, 64, 65, 300)


def _plain(query: Any, keys: Any, values: Any, softcap: float | None, sinks: Any) -> Any:
    """(num_query, D) attention of one token, (num_query, D), over the keys that it sees, (num_seen, num_kv, D)."""
    query, keys, values = (part.double() for part in (query, keys, values))
    keys, values = (part.repeat_interleave(_NUM_QUERY // _NUM_KV, 1) for part in (keys, values))
    scores = torch.einsum("hd,khd->hk", query, keys) * _SCALE
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    return torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(keys)], values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [24, 128])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 2.0)])
def test_single_tokens_attend_to_the_keys_of_their_sequence(  # noqa: PLR0917
    dtype: str, dim: int, parts: int, has_sinks: bool, window: int | None, softcap: float | None
) -> None:
    """Sequences of one key to several blocks, in any order in the pool; sinks from no share to all."""
    from enginehouse_hf.cuda.decode_attention import decode_attention

    torch.manual_seed(dim)
    kind = getattr(torch, dtype)
    table = torch.randperm(len(_LENGTHS) * max(_LENGTHS)).view(len(_LENGTHS), -1)
    query = torch.randn(len(_LENGTHS), _NUM_QUERY, dim).to(kind)
    keys, values = (torch.randn(table.numel(), _NUM_KV, dim).to(kind) for _ in range(2))
    sinks = torch.tensor([-200.0, -1.0, 0.0, 2.0, 8.0, 200.0]).to(kind) if has_sinks else None
    expected = torch.stack(
        [
            _plain(one, keys[seen], values[seen], softcap, sinks)
            for one, places, length in zip(query, table, _LENGTHS, strict=True)
            for seen in [places[max(0, length - (window or length)) : length]]
        ]
    )
    slots, lengths = torch.arange(len(_LENGTHS), dtype=torch.int32), torch.tensor(_LENGTHS, dtype=torch.int32)
    tensors = (query, keys, values, table.to(torch.int32), slots, lengths)
    found = decode_attention(
        *(tensor.to(_DEVICE) for tensor in tensors),
        scale=_SCALE, window=window, softcap=softcap, sinks=None if sinks is None else sinks.to(_DEVICE), parts=parts,
    )  # fmt: skip

    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == "float32" else 0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [24, 128])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kinds", [("fp8", "fp8"), ("fp8", None), (None, "fp8")])
def test_single_tokens_attend_to_keys_and_values_in_8_bits(
    dtype: str, dim: int, parts: int, kinds: tuple[Any, Any]
) -> None:
    """As to the numbers that they stand for, with heads and tokens of different sizes."""
    from enginehouse_hf.cuda.decode_attention import decode_attention
    from enginehouse_hf.cuda.kv_tensor import KvTensor

    torch.manual_seed(dim)
    kind = getattr(torch, dtype)
    table = torch.randperm(len(_LENGTHS) * max(_LENGTHS)).view(len(_LENGTHS), -1)
    query = torch.randn(len(_LENGTHS), _NUM_QUERY, dim).to(kind)
    every = torch.arange(table.numel())
    kept = []
    for packs in kinds:
        new = torch.randn(table.numel(), _NUM_KV, dim) * torch.rand(table.numel(), _NUM_KV, 1)
        kept.append(KvTensor.allocate(table.numel(), (_NUM_KV, dim), kind, torch.device(_DEVICE), packs))
        kept[-1].write(every.to(_DEVICE), new.to(kind).to(_DEVICE))
    keys, values = (
        part.numbers.cpu().double() * (1.0 if part.scales is None else part.scales.cpu().double()[..., None])
        for part in kept
    )
    expected = torch.stack(
        [
            _plain(one, keys[places[:length]], values[places[:length]], None, None)
            for one, places, length in zip(query, table, _LENGTHS, strict=True)
        ]
    )
    slots, lengths = torch.arange(len(_LENGTHS), dtype=torch.int32), torch.tensor(_LENGTHS, dtype=torch.int32)
    tensors = (query, *(part.numbers for part in kept), table.to(torch.int32), slots, lengths)
    found = decode_attention(
        *(tensor.to(_DEVICE) for tensor in tensors),
        scale=_SCALE, key_scales=kept[0].scales, value_scales=kept[1].scales, parts=parts,
    )  # fmt: skip

    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == "float32" else 0.01)
