"""Images in sequences: the chunks of a prompt, and the embeddings that are kept."""

from __future__ import annotations

from enginehouse.engine.media.embeddings import Embeddings
from enginehouse.engine.media.prompts import EncodedPrompt, PlacedChunk, encode_prompt, without_media

__all__ = ["Embeddings", "EncodedPrompt", "PlacedChunk", "encode_prompt", "without_media"]
