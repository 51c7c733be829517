"""Images and recordings in sequences: the chunks of a prompt, and the embeddings that are kept."""

from __future__ import annotations

from enginehouse.engine.media.embeddings import Embeddings
from enginehouse.engine.media.prompts import (
    EncodedPrompt,
    PlacedChunk,
    Preparers,
    encode_prompt,
    preparers_of,
    without_media,
)

__all__ = ["Embeddings", "EncodedPrompt", "PlacedChunk", "Preparers", "encode_prompt", "preparers_of", "without_media"]
