"""Validates spans, because llama.cpp terminates the process on some invalid ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import InvalidSpan
from enginehouse.contract.media import MediaInput

__all__ = ["check_batch_ids", "check_chunk", "check_span"]

_OUTPUTS = frozenset(("none", "last", "all"))


def check_span(span: Span, length: int, max_context: int) -> NDArray[np.int32]:
    """Check one span, except the values of its ids.

    Args:
        span: the span to check.
        length: current length of its sequence.
        max_context: longest sequence allowed.

    Returns:
        Its ids, (num_tokens,) int32.

    Raises:
        InvalidSpan: the span violates the contract.
    """
    token_ids = span.input
    if isinstance(token_ids, MediaInput):
        raise InvalidSpan(f"sequence {span.sequence}: a chunk of an image needs a pass of its own")
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise InvalidSpan(f"sequence {span.sequence}: input must be a one-dimensional int32 array of token ids")
    if not len(token_ids):
        raise InvalidSpan(f"sequence {span.sequence}: a span needs at least one token")
    _check_length(span, len(token_ids), length, max_context)
    if span.outputs not in _OUTPUTS:
        raise InvalidSpan(f"sequence {span.sequence}: outputs must be none, last or all, not {span.outputs!r}")
    if span.num_layers is not None:
        raise InvalidSpan(f"sequence {span.sequence}: llama.cpp cannot run only {span.num_layers} layers")
    return token_ids


def check_chunk(span: Span, media: MediaInput, length: int, max_context: int, width: int) -> NDArray[np.float32]:
    """Check a span of an image and return its embedding, (num_tokens, width) float32, contiguous.

    Raises:
        InvalidSpan: the span violates the contract.
    """
    embedding, num_tokens = media.embedding, media.chunk.num_tokens
    if span.outputs != "none":
        raise InvalidSpan(f"sequence {span.sequence}: a chunk of an image has no logits, not {span.outputs!r}")
    if not isinstance(embedding, np.ndarray) or embedding.dtype != np.float32 or embedding.shape != (num_tokens, width):
        raise InvalidSpan(f"sequence {span.sequence}: the embedding must be float32 of shape ({num_tokens}, {width})")
    _check_length(span, num_tokens, length, max_context)
    return np.ascontiguousarray(embedding)


def _check_length(span: Span, num_tokens: int, length: int, max_context: int) -> None:
    if span.start != length:
        raise InvalidSpan(f"sequence {span.sequence} holds {length} tokens, but the span starts at {span.start}")
    if length + num_tokens > max_context:
        raise InvalidSpan(
            f"sequence {span.sequence} would hold {length + num_tokens} tokens; its context is {max_context}"
        )


def check_batch_ids(token_ids: NDArray[np.int32], vocab_size: int) -> None:
    """Raise InvalidSpan for ids outside the vocabulary. ``token_ids``: (num_tokens,) int32, of a whole batch."""
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0]
        raise InvalidSpan(f"token id {wrong} is outside the vocabulary of {vocab_size}")
