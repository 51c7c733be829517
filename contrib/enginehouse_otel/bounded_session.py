"""HTTP session of the exporters: reads at most 64 KiB of a collector's response, without decompression."""

from __future__ import annotations

import io
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter

__all__ = ["bounded_session"]

_MAX_BYTES = 65536
_MAX_S = 10.0


class _BoundedAdapter(HTTPAdapter):
    """Reads only the beginning of each response; a collector's responses are short."""

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send a request; same signature and errors as the library."""
        options["stream"] = True
        request.headers["Accept-Encoding"] = "identity"
        response = super().send(request, *args, **options)
        raw, ends, data = response.raw, time.monotonic() + _MAX_S, b""
        read = getattr(raw, "read1", raw.read)  # returns available data without waiting for more
        try:
            while len(data) < _MAX_BYTES and time.monotonic() < ends:
                piece = read(_MAX_BYTES - len(data), decode_content=False)
                if not piece:
                    break
                data += piece
        finally:
            raw.close()
        response.raw = io.BytesIO(data)
        return response


def bounded_session() -> requests.Session:
    """Return a session whose responses are bounded in bytes and time."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter())
    return session
