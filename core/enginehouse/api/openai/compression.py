"""Prompt compression on the wire: the request field, the response header, and the member of the details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import gt, le, optional

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Compression
from enginehouse.pipeline.compressing import Compressed
from enginehouse.pipeline.pipeline import RunningRequest
from enginehouse.settings.profiles import Profile
from enginehouse.settings.structuring import find_problems, strict_converter

__all__ = [
    "compression_figures",
    "compression_headers",
    "find_ignored_in_compression",
    "read_compression",
    "shown_compressed",
]


def compression_headers(running: Sequence[RunningRequest], profile: Profile) -> list[tuple[str, str]]:
    """Return the profile's header for a shortened prompt; known before generation starts."""
    header = profile.optimization_headers.get("compression")
    is_shorter = any(one.compressed is not None and one.compressed.num_saved > 0 for one in running)
    return [(header, "true")] if header and is_shorter else []


def shown_compressed(running: Sequence[RunningRequest]) -> dict[str, Any] | None:
    """Return the details of compressed prompts, over all of them; None if no compression was requested."""
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


def compression_figures(running: Sequence[RunningRequest]) -> Counter[str]:
    """Return the metrics of compressed prompts, except zeros: their tokens without and with compression."""
    figures: Counter[str] = Counter()
    for one in running:
        if one.compressed is not None and one.compressed.error:
            figures["failed_compressions"] += 1
        elif one.compressed is not None and one.compressed.num_saved > 0:
            figures["compressed_tokens_before"] += one.generation.num_prompt_tokens + one.compressed.num_saved
            figures["compressed_tokens_after"] += one.generation.num_prompt_tokens
    return figures


@frozen(kw_only=True)
class _CompressionBody:
    """``compression`` as an object."""

    method: str | None = None
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))


_CONVERTER = strict_converter(forbid_extra_keys=False)


def read_compression(value: Any) -> Compression | None:
    """Read the request field; None if it is absent.

    Raises:
        InvalidRequest: it is malformed.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return Compression(is_on=value)
    if not isinstance(value, dict):
        raise InvalidRequest("compression: must be true, false or an object", "compression")
    try:
        body = _CONVERTER.structure(value, _CompressionBody)
    except Exception as error:
        problem = next(find_problems(error, "compression"))
        raise InvalidRequest(str(problem), problem.path) from error
    return Compression(method=body.method, ratio=body.ratio)


def find_ignored_in_compression(value: Any) -> Iterator[str]:
    """Yield paths of unknown members."""
    known = {attribute.name for attribute in attrs.fields(_CompressionBody)}
    if isinstance(value, dict):
        yield from (f"compression.{name}" for name in value if name not in known)
