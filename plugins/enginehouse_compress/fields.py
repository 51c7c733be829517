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
    """``compression`` as an object.

    Attributes:
        method: name of a compressor.
        ratio: share of the compressible tokens that is kept.
    """

    method: str | None = None
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))


@frozen(kw_only=True)
class CompressionFields:
    """Fields of the request body.

    Attributes:
        compression: shorten the prompt: false, true, or an object with ``method`` and ``ratio``.
    """

    compression: bool | CompressionBody | None = None


def asked_compression(request: GenerateRequest) -> bool | CompressionBody | None:
    """Return the field of a request; None if it is not given."""
    found: bool | CompressionBody | None = request.extensions.get(NAME, {}).get("compression")
    return found
