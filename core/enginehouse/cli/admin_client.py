"""One request to the admin API of a running server, for commands; a refusal becomes an error of ours."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from enginehouse.errors import EnginehouseError

__all__ = ["ServerRefusal", "ask_server"]


class ServerRefusal(EnginehouseError):
    """The server said no, or nothing that we understand."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: the redirect is the answer."""


# Proxies of the environment are for the user's browsing; the server is usually on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def ask_server(
    url: str, key: str | None, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON that a server answers; waits as long as it takes, for loading a model may take minutes.

    Args:
        url: where the server is; a ``/v1`` behind it does not matter.
        path: an address with any characters in it.
        body: sent as JSON.

    Raises:
        ServerRefusal: it cannot be reached, or refused; says what it said.
    """
    address = url.rstrip("/").removesuffix("/v1") + urllib.parse.quote(path)
    if not address.startswith(("http://", "https://")):
        raise ServerRefusal(f"{url!r} is no address of a server; it must begin with http:// or https://")
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, headers, method=method)
    try:
        with _OPENER.open(request) as answer:
            return _object(answer.read(), address)
    except urllib.error.HTTPError as error:
        with error:
            said = _object(error.read(), address).get("error", {})
        raise ServerRefusal(str(said.get("message", f"the server answered {error.code}"))) from error
    except (urllib.error.URLError, OSError) as error:
        raise ServerRefusal(f"no server answers at {url}: {getattr(error, 'reason', error)}") from error


def _object(body: bytes, address: str) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ServerRefusal(f"what answers at {address} is no Enginehouse server")
    return data
