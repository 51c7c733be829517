"""The pooling type of a GGUF file, which makes it a pooling model. Read before a model is loaded, without llama.cpp."""

from __future__ import annotations

from enum import IntEnum

from enginehouse.contract.errors import ModelLoadError
from enginehouse_llamacpp.gguf import GgufHeader
from enginehouse_llamacpp.options import LlamaCppOptions

__all__ = ["PoolingType", "find_pooling"]


class PoolingType(IntEnum):
    """Values of ``enum llama_pooling_type`` that give one row per text."""

    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def find_pooling(header: GgufHeader, options: LlamaCppOptions) -> PoolingType | None:
    """Return the pooling of a model; None for a model that generates text.

    Raises:
        ModelLoadError: the file is of an encoder without pooling, or its pooling type is unknown.
    """
    architecture = header.architecture
    if options.pooling is not None:
        return PoolingType[options.pooling.upper()]
    value = header.values.get(f"{architecture}.pooling_type", 0)
    if value in (0, -1):
        if header.values.get(f"{architecture}.attention.causal", True):
            return None
        raise ModelLoadError(
            f"{header.path}: an encoder ({architecture}) whose file states no pooling: set pooling to mean, "
            "cls or last, as the model was trained"
        )
    try:
        return PoolingType(int(str(value)))
    except ValueError:
        raise ModelLoadError(f"{header.path}: its pooling_type is {str(value)[:40]!r}; 1 to 4 are known") from None
