"""The id of a request: in the header of every answer, in the log, and where running requests are listed.

Clients may send one in ``X-Request-Id``. It comes back in a header and stands in log lines, so it must be one word.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from enginehouse.contract.errors import InvalidRequest

__all__ = ["REQUEST_ID_HEADER", "new_request_id", "sent_request_id"]

REQUEST_ID_HEADER = b"x-request-id"

_WORD = re.compile(rb"[A-Za-z0-9._~:+=@-]{1,128}")


def new_request_id() -> str:
    """An id for a request whose client sent none and which makes no answer with an id of its own."""
    return f"req-{uuid.uuid4().hex}"


def sent_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The id that the client sent; None without one.

    Raises:
        InvalidRequest: it is no word of 1 to 128 letters, digits and ``._~:+=@-``, or there are several.
    """
    values = [value for name, value in headers if name == REQUEST_ID_HEADER]
    if not values:
        return None
    if len(values) > 1 or not _WORD.fullmatch(values[0]):
        message = "X-Request-Id: must be one word of 1 to 128 letters, digits and ._~:+=@-"
        raise InvalidRequest(message, "X-Request-Id")
    return values[0].decode("ascii")
