"""Request body bytes to plain JSON data. Does not know any fields.

Replaces the ``data`` argument of Litestar's handlers: the limits are settings, nesting and the number of values are
bounded before parsing, and every error has the surface's body.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import msgspec

from enginehouse.api.http.errors import BodyTooLarge, ClientLeft
from enginehouse.api.http.exchange import Receive
from enginehouse.contract.errors import InvalidRequest

_MAX_CONTAINERS = 2**19
_MAX_VALUES = 2**21  # a prompt of a million token ids has half as many


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body, without the byte order mark that some clients write before UTF-8.

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
    return b"".join(chunks).removeprefix(codecs.BOM_UTF8)


async def read_empty_body(receive: Receive, max_bytes: int) -> None:
    """Read the body of a request without fields: empty, or an empty JSON object.

    Raises:
        InvalidRequest: the body has fields.
        BodyTooLarge, ClientLeft: as for :func:`read_body`.
    """
    body = await read_body(receive, max_bytes)
    if body and (members := parse_object(body)):
        name = next(iter(members))
        raise InvalidRequest(f"{name}: this address takes no fields", name)


_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in a string of JSON; the group is half of a character by itself."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; members that are null are left out, because null means absent.

    Raises:
        InvalidRequest: the body is not a JSON object in UTF-8, or has too many values.
    """
    _check_number(_outside_texts(body))
    try:
        data = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("The JSON is nested too deeply.") from error
    except (msgspec.MsgspecError, ValueError) as error:
        half = next((found[1] for found in _ESCAPE.finditer(body) if found[1]), None)
        reason = (
            f"\\{half.decode('ascii', 'replace')} is half of a character, which UTF-8 does not have" if half else error
        )
        raise InvalidRequest(f"The request body is not valid JSON in UTF-8: {reason}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return {name: value for name, value in data.items() if value is not None}


def _outside_texts(text: bytes) -> bytes:
    """Return valid JSON text without the contents of its strings: brackets, commas, colons and numbers remain."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(text.split(b'"')[::2])


def _check_number(bare: bytes) -> None:
    """Refuse small bodies that take long to decode; ``bare`` is JSON without the contents of its strings."""
    num_containers = bare.count(b"[") + bare.count(b"{")
    if num_containers > _MAX_CONTAINERS:
        raise InvalidRequest(f"The JSON holds {num_containers} lists and objects, more than {_MAX_CONTAINERS}.")
    if (num_values := bare.count(b",")) > _MAX_VALUES:
        raise InvalidRequest(f"The JSON holds {num_values} values, more than {_MAX_VALUES}.")


def without_nulls(value: Any, max_depth: int) -> Any:
    """Return ``value`` without null members at any level.

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
    """Return ``value`` unchanged, for fields in which null is meaningful.

    Raises:
        InvalidRequest: it is nested deeper than ``max_depth``.
    """
    if isinstance(value, dict | list):
        if max_depth <= 0:
            raise InvalidRequest("The JSON is nested too deeply (limits.max_json_depth).")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                check_depth(item, max_depth - 1)
    return value
