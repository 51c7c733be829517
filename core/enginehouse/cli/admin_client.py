"""One request to the admin API of a running server, for commands; refusals are mapped to our exceptions."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from enginehouse.cli.addresses import connection_to, full_url
from enginehouse.contract.errors import EnginehouseError

__all__ = ["ServerRefusal", "ask_server"]


_MAX_BYTES = 16 * 2**20
_MAX_MESSAGE_CHARS = 2000


class ServerRefusal(EnginehouseError):
    """The server refused, or its response was not understood."""


def ask_server(
    url: str, key: str | None, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON response of a server; no timeout, since loading a model may take minutes.

    Redirects are not followed, as the key is only for the server that was named. Proxies of the environment are not
    used, as they are for the user's browsing.

    Args:
        url: the server; a trailing ``/v1`` is ignored.
        path: an unescaped path.
        body: sent as JSON.

    Raises:
        ServerRefusal: it cannot be reached, or refused; includes its message.
    """
    address = full_url(url)
    if address is None:
        raise ServerRefusal(f"{url!r} is not an address of a server; it must begin with http://, https:// or unix:")
    address = address.removesuffix("/v1")
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    whole_path = urllib.parse.urlsplit(address).path + urllib.parse.quote(path)
    try:
        with closing(connection_to(address, None)) as connection:
            connection.request(method, whole_path, data, headers)
            answer = connection.getresponse()
            said = _object(answer.read(_MAX_BYTES), f"{url}{path}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerRefusal(f"no server answers at {url}: {error or type(error).__name__}") from error
    if answer.status >= 300:
        refusal = said.get("error")
        message = refusal.get("message") if isinstance(refusal, dict) else None
        raise ServerRefusal(str(message or f"the server answered {answer.status}")[:_MAX_MESSAGE_CHARS])
    return said


def _object(body: bytes, address: str) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ServerRefusal(f"the server at {address} is not an Enginehouse server")
    return data
