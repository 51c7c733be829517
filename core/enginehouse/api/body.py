"""Bytes of a request body -> plain JSON data. Knows no fields."""

from __future__ import annotations

from typing import Any

import msgspec

from enginehouse.api.errors import BodyTooLarge, ClientLeft
from enginehouse.api.exchange import Receive
from enginehouse.errors import InvalidRequest

__all__ = ["KEEPS_NULLS", "check_depth", "parse_object", "read_body", "without_nulls"]

KEEPS_NULLS = {"enginehouse": "keeps nulls"}
"""Metadata of a body's attribute whose data is passed on: in JSON Schemas and template variables null is a value."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it has more than ``max_bytes`` bytes.
        ClientLeft: the connection closed before the end.
    """
    chunks: list[bytes] = []
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("The client left while it sent its request.")
        chunks.append(message.get("body", b""))
        num_bytes += len(chunks[-1])
        if num_bytes > max_bytes:
            raise BodyTooLarge.of(max_bytes)
        more = message.get("more_body", False)
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; members that are null are left out, for null means absent.

    Raises:
        InvalidRequest: the body is no JSON object in UTF-8.
    """
    try:
        data = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("The JSON is nested too deeply.") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"The request body is not valid JSON in UTF-8: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return {name: value for name, value in data.items() if value is not None}


def without_nulls(value: Any, max_depth: int) -> Any:
    """``value`` without null members at any level.

    Raises:
        InvalidRequest: it is nested deeper than ``max_depth``.
    """
    if not isinstance(value, dict | list):
        return value
    if max_depth <= 0:
        raise InvalidRequest("The JSON is nested too deeply (limits.max_json_depth).")
    if isinstance(value, dict):
        return {key: without_nulls(item, max_depth - 1) for key, item in value.items() if item is not None}
    return [without_nulls(item, max_depth - 1) if isinstance(item, dict | list) else item for item in value]


def check_depth(value: Any, max_depth: int) -> Any:
    """``value`` as it is, for fields in which null has a meaning of its own.

    Raises:
        InvalidRequest: it is nested deeper than ``max_depth``.
    """
    if isinstance(value, dict | list):
        if max_depth <= 0:
            raise InvalidRequest("The JSON is nested too deeply (limits.max_json_depth).")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, max_depth - 1)
    return value
