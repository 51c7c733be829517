"""Prompt compression, and the compressors ``lossless``, ``extractive``, ``scored`` and ``semantic``. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.compressor import Compressor
from enginehouse.contract.preparer import Preparer
from enginehouse_compress.options import CompressOptions as options

__all__ = ["options", "register_compressors", "register_preparers"]


@hookimpl
def register_compressors(register: Callable[[Compressor], None], options: options) -> None:
    """Register the methods; ``extractive`` only with the extra ``compress``."""
    from enginehouse_compress.extractive import ExtractiveCompressor
    from enginehouse_compress.lossless import LosslessCompressor
    from enginehouse_compress.relevance import is_bm25_installed
    from enginehouse_compress.scored import ScoredCompressor
    from enginehouse_compress.semantic import SemanticCompressor

    register(LosslessCompressor())
    if is_bm25_installed():
        register(ExtractiveCompressor(options))
    register(ScoredCompressor(options))
    register(SemanticCompressor())


@hookimpl
def register_preparers(register: Callable[[Preparer], None]) -> None:
    """Register prompt compression, by any registered compressor."""
    from enginehouse_compress.preparer import CompressionPreparer

    register(CompressionPreparer())
