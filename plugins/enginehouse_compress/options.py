"""Settings of the plugin, ``[plugins.compress]``."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, le

__all__ = ["CompressOptions", "Language"]

Language = Literal[
    "arabic", "danish", "dutch", "english", "finnish", "french", "german", "hungarian", "italian", "norwegian",
    "porter", "portuguese", "romanian", "russian", "spanish", "swedish", "turkish",
]  # fmt: skip


@frozen(kw_only=True)
class CompressOptions:
    """Options of the methods.

    Attributes:
        language: stemmer language of ``extractive``; word endings of this language are ignored when comparing words.
        chunk_chars: characters that ``scored`` without a question scores in one chunk.
    """

    language: Language = "english"
    chunk_chars: int = field(default=1200, validator=[ge(200), le(20_000)])
