"""The request field ``compression``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import gt, le, optional

from enginehouse.contract.types import GenerateRequest

__all__ = ["NAME", "CompressionBody", "CompressionFields", "asked_compression"]

NAME = "compression"
"""Name of the preparer."""


@frozen(kw_only=True)
class CompressionBody:
    """``compression`` as an object."""

    method: str | None = field(default=None, metadata={"description": "Name of a compressor."})
    ratio: float | None = field(
        default=None,
        validator=optional([gt(0), le(1)]),
        metadata={"description": "Share of the compressible tokens that is kept."},
    )


@frozen(kw_only=True)
class CompressionFields:
    """Fields of the request body."""

    compression: bool | CompressionBody | None = field(
        default=None,
        metadata={"description": "Shorten the prompt: false, true, or an object with `method` and `ratio`."},
    )


def asked_compression(request: GenerateRequest) -> bool | CompressionBody | None:
    """Return the field of a request; None if it is not given."""
    found: bool | CompressionBody | None = request.extensions.get(NAME, {}).get("compression")
    return found
