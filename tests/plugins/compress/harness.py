"""Helpers of the tests of this folder."""

from __future__ import annotations

from enginehouse.contract.compressor import CompressibleText, CompressionTask, cut
from enginehouse_compress.lossless import LosslessCompressor
from enginehouse_testkit.fake_compression import FakeCompressionTools


def compress(text: str, protected: tuple[tuple[int, int], ...] = ()) -> str:
    compressible = CompressibleText(text=text, protected=protected)
    task = CompressionTask(texts=(compressible,), question="", max_tokens=0)
    (kept,) = LosslessCompressor().compress(task, FakeCompressionTools())
    return cut(compressible, kept)
