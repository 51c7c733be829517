"""The request field ``compression``: whether and how to shorten the prompt. Knows no compressor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import gt, le, optional

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import Compression
from enginehouse.settings.structuring import find_problems, strict_converter

__all__ = ["find_ignored_in_compression", "read_compression"]


@frozen(kw_only=True)
class _CompressionBody:
    """``compression`` as an object."""

    method: str | None = None
    ratio: float | None = field(default=None, validator=optional([gt(0), le(1)]))


_CONVERTER = strict_converter(forbid_extra_keys=False)


def read_compression(value: Any) -> Compression | None:
    """What a request says; None when it says nothing.

    Raises:
        InvalidRequest: it has a wrong form.
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
    """Paths of members that nobody knows."""
    known = {attribute.name for attribute in attrs.fields(_CompressionBody)}
    if isinstance(value, dict):
        yield from (f"compression.{name}" for name in value if name not in known)
