"""Texts of all kinds, whose embeddings are compared with those of a reference."""

from __future__ import annotations

import random

__all__ = ["embedding_texts"]

_KINDS = (
    "the quick brown fox jumps over the lazy dog",
    "Größe naïve café façade coöperate Œuvre İstanbul Straße",
    "Съешь же ещё этих мягких французских булок",
    "日本語のテキスト 中文文本 한국어 텍스트",
    "שלום עולם مرحبا بالعالم",
    "🙂🚀👩‍👩‍👧 ❄️ ∑ ≠ ½ ﬁ ①",
    "def add(left, right):\n\treturn left + right  # sum",
    "https://example.com/a?b=c&d=%20 user@example.com 1,234.50 2026-11-30",
    "a\u200bb\u00adc\ufeffd e\u0301 \x07\x7f \u2028 \u3000",
    "supercalifragilisticexpialidocious" * 4,
)


def embedding_texts() -> list[str]:
    """300 texts of 0 to 256 tokens: words of one or several kinds, and special cases."""
    chosen = random.Random(4)
    words = [kind.split(" ") for kind in _KINDS]
    texts = ["", " ", "\n\t ", "\u200b", "a", "word " * 10_000, *_KINDS, *(kind.upper() for kind in _KINDS)]
    while len(texts) < 300:
        kinds = chosen.sample(words, chosen.randint(1, 3))
        length = min(150, int(chosen.lognormvariate(1.4, 0.9)) + 1)
        texts.append(" ".join(chosen.choice(chosen.choice(kinds)) for _ in range(length)))
    return texts
