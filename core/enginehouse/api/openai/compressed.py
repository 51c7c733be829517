"""What answers tell of a shortened prompt: the response header, and a member of an answer's details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginehouse.pipeline.compressing import Compressed
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.settings.profiles import Profile

__all__ = ["compression_figures", "compression_headers", "shown_compressed"]


def compression_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """The header by which a profile tells that a prompt was shortened; known before the answer begins."""
    header = profile.optimization_headers.get("compression")
    is_shorter = any(one.compressed is not None and one.compressed.num_saved > 0 for one in running)
    return [(header, "true")] if header and is_shorter else []


def shown_compressed(running: Sequence[RunningRequest]) -> dict[str, Any] | None:
    """What is told about compressed prompts, over all of them; None where nothing was to be compressed."""
    compressed: list[Compressed] = [one.compressed for one in running if one.compressed is not None]
    if not compressed:
        return None
    errors = [one.error for one in compressed if one.error]
    return {
        "method": compressed[0].method,
        "tokens_before": sum(one.tokens_before for one in compressed),
        "tokens_after": sum(one.tokens_after for one in compressed),
        "scored_tokens": sum(one.scored_tokens for one in compressed),
        "ms": round(1000 * sum(one.seconds for one in compressed), 3),
        "failed": errors[0] if errors else None,
    }


def compression_figures(running: Sequence[RunningRequest]) -> dict[str, int]:
    """The figures of compressed prompts: their tokens as they would have been and as they were."""
    figures = {"compressed_tokens_before": 0, "compressed_tokens_after": 0, "failed_compressions": 0}
    for one in running:
        if one.compressed is not None and one.compressed.error:
            figures["failed_compressions"] += 1
        elif one.compressed is not None and one.compressed.num_saved > 0:
            figures["compressed_tokens_before"] += one.generation.num_prompt_tokens + one.compressed.num_saved
            figures["compressed_tokens_after"] += one.generation.num_prompt_tokens
    return figures
