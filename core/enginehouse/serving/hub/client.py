"""HTTP client of a hub: file listings of repositories, and contents of files from any offset.

Uses the standard library: ``huggingface_hub`` discards received data when a download fails (since 2.0) and does not
check hashes, whereas ``enginehouse pull`` guarantees both. Reads the same variables: ``HF_ENDPOINT``, ``HF_TOKEN``.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from attrs import field, frozen

from enginehouse.contract.errors import DownloadError
from enginehouse.contract.regular_files import read_regular_text
from enginehouse.serving.hub.cache import user_folder
from enginehouse.serving.hub.listing import Listing, read_listing
from enginehouse.serving.hub.reference import HubReference
from enginehouse.serving.hub.refusals import HubUnreachable, refusal

__all__ = ["Content", "HubClient"]

_ENDPOINT = "https://huggingface.co"
_MAX_LISTING_BYTES = 8 * 1024 * 1024
_MAX_LISTING_S = 120.0
_MAX_TOKEN_BYTES = 65536
_READ_BYTES = 65536


@frozen
class HubClient:
    """Client of one hub.

    Attributes:
        endpoint: URL of the hub, without a trailing slash.
        token: sent only to this URL, never to redirect targets.
        timeout_s: seconds without a byte after which a connection is considered lost.
    """

    endpoint: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> HubClient:
        """Return a client for the hub and the token that the hub's own tools would use.

        Raises:
            DownloadError: ``HF_ENDPOINT`` is not a URL.
        """
        endpoint = (env.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
            raise DownloadError(f"HF_ENDPOINT must be an address such as {_ENDPOINT}, not {endpoint!r}")
        return cls(endpoint, _token(env))

    def list_files(self, reference: HubReference) -> Listing:
        """Return the files of the repository at that revision.

        Raises:
            HubUnreachable: the hub does not answer.
            DownloadError: the model or revision does not exist, or may not be read.
        """
        revision = quote(reference.revision, safe="")
        url = f"{self.endpoint}/api/models/{reference.model_id}/revision/{revision}?blobs=true"
        with self._open(url, reference) as answer:
            try:
                data = json.loads(_read(answer))
            except (ValueError, RecursionError, OSError, http.client.HTTPException) as error:
                raise HubUnreachable(f"{self.endpoint} does not answer as a model hub does: {error}") from error
        return read_listing(data, self.endpoint)

    def open_file(self, reference: HubReference, commit: str, path: str, start: int = 0) -> Content:
        """Open a file from byte ``start`` on; close it after use. A server may ignore ``start``.

        Raises:
            HubUnreachable, DownloadError: as for :meth:`list_files`.
        """
        url = f"{self.endpoint}/{reference.model_id}/resolve/{commit}/{quote(path)}"
        answer = self._open(url, reference, {"Range": f"bytes={start}-"} if start else {})
        return Content(answer, start if answer.status == 206 else 0)

    def _open(self, url: str, reference: HubReference, headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "enginehouse", "Accept-Encoding": "identity"})
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        if self.token:
            # "Unredirected": contents are on other hosts, which must not receive the token.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            return urllib.request.build_opener(_Redirects).open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error, reference, self.endpoint, has_token=self.token is not None) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise HubUnreachable(f"{self.endpoint} cannot be reached: {reason}") from error


@frozen
class Content:
    """Response with the bytes of a file; ``start`` is the offset in the file at which they begin."""

    answer: http.client.HTTPResponse
    start: int

    def __enter__(self) -> http.client.HTTPResponse:
        return self.answer

    def __exit__(self, *_: object) -> None:
        self.answer.close()


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token is sent on only within the same host (a renamed repository)."""

    def redirect_request(  # noqa: PLR0917 - the signature is the library's
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the next request."""
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None:
            fp.close()  # the library would read its body, of any length
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and urlsplit(req.full_url)[:2] == urlsplit(newurl)[:2]:
            new.add_unredirected_header("Authorization", token)
        return new


def _read(answer: Any) -> bytes:
    """Return the body of a response; raises ValueError if it exceeds the limits of size or time."""
    pieces, left, ends = [], _MAX_LISTING_BYTES, time.monotonic() + _MAX_LISTING_S
    while piece := answer.read1(_READ_BYTES):
        left -= len(piece)
        if left < 0 or time.monotonic() > ends:
            raise ValueError(f"more than {_MAX_LISTING_BYTES} bytes or {_MAX_LISTING_S:g} seconds for a list of files")
        pieces.append(piece)
    return b"".join(pieces)


def _token(env: Mapping[str, str]) -> str | None:
    """Return the token from the environment, else the one that the hub's own login has stored."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := env.get(name, "").strip():
            return token
    if env.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    file = Path(env.get("HF_TOKEN_PATH") or user_folder(env) / "token").expanduser()
    try:
        return read_regular_text(file, _MAX_TOKEN_BYTES).strip() or None
    except (OSError, ValueError):
        return None
