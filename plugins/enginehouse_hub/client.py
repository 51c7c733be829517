"""HTTP client of a hub: file listings of repositories, and contents of files from any offset.

Session, headers, tokens and names come from ``huggingface_hub``. Its own requests are not used: they read a listing, an
error or the body of a redirect whole, however long, and its downloads discard received data when they fail (since 2.0)
and do not check hashes, whereas ``enginehouse pull`` guarantees both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from attrs import field, frozen

from enginehouse.contract.errors import DownloadError, MissingDependency
from enginehouse_hub.reference import HubReference

try:
    from httpx2 import HTTPError, InvalidURL, Response
    from huggingface_hub import constants, get_session, get_token
    from huggingface_hub.utils import build_hf_headers, validate_repo_id
except ImportError as error:
    raise MissingDependency("huggingface_hub", "hub") from error

from enginehouse_hub.listing import Listing, read_listing
from enginehouse_hub.refusals import HubUnreachable, refusal

__all__ = ["Content", "HubClient"]

_MAX_LISTING_BYTES = 8 * 1024 * 1024
_MAX_LISTING_S = 120.0
_MAX_REDIRECTS = 10


@frozen
class Content:
    """Response with the bytes of a file; ``start`` is the offset in the file at which they begin."""

    response: Response
    start: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes as they arrive. Raises httpx2.TransportError if the connection breaks."""
        return self.response.iter_raw()


@frozen
class HubClient:
    """Client of one hub.

    Attributes:
        endpoint: URL of the hub, without a trailing slash.
        token: sent only to this URL, never to redirect targets on other hosts.
        timeout_s: seconds without a byte after which a connection is considered lost.
    """

    endpoint: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0

    @classmethod
    def from_env(cls) -> HubClient:
        """Return a client for the hub and the token that the hub's own tools would use.

        Raises:
            DownloadError: ``HF_ENDPOINT`` is not a URL.
        """
        endpoint = constants.ENDPOINT
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
            raise DownloadError(f"HF_ENDPOINT must be an address such as https://huggingface.co, not {endpoint!r}")
        return cls(endpoint, None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token())

    def list_files(self, reference: HubReference) -> Listing:
        """Return the files of the repository at that revision.

        Raises:
            HubUnreachable: the hub does not answer.
            DownloadError: the model or revision does not exist, or may not be read.
        """
        try:
            validate_repo_id(reference.model_id)
        except ValueError as error:
            raise DownloadError(f"{reference.model_id!r} cannot be the name of a model: {error}") from error
        revision = quote(reference.revision, safe="")
        url = f"{self.endpoint}/api/models/{reference.model_id}/revision/{revision}?blobs=true"
        with self._open(url, reference, {}) as response:
            try:
                data = json.loads(_read(response))
            except (ValueError, RecursionError, HTTPError) as error:
                raise HubUnreachable(f"{self.endpoint} does not answer as a model hub does: {error}") from error
        return read_listing(data, self.endpoint)

    @contextmanager
    def open_file(self, reference: HubReference, commit: str, path: str, start: int = 0) -> Iterator[Content]:
        """Open a file from byte ``start`` on. A server may ignore ``start``.

        Raises:
            HubUnreachable, DownloadError: as for :meth:`list_files`.
        """
        url = f"{self.endpoint}/{reference.model_id}/resolve/{commit}/{quote(path)}"
        with self._open(url, reference, {"Range": f"bytes={start}-"} if start else {}) as response:
            yield Content(response, start if response.status_code == 206 else 0)

    @contextmanager
    def _open(self, url: str, reference: HubReference, headers: Mapping[str, str]) -> Iterator[Response]:
        """Yield a successful response whose body is not read yet; the bodies of others are not read at all."""
        try:
            for _ in range(_MAX_REDIRECTS):
                response = self._send(url, headers)
                if not response.has_redirect_location:
                    break
                response.close()
                url = urljoin(url, response.headers["Location"])
        except (HTTPError, InvalidURL, OSError, ValueError) as error:
            raise HubUnreachable(f"{self.endpoint} cannot be reached: {error}") from error
        try:
            if not response.is_success:
                raise refusal(response, reference, self.endpoint, has_token=self.token is not None)
            yield response
        finally:
            response.close()

    def _send(self, url: str, headers: Mapping[str, str]) -> Response:
        # Contents are on other hosts, which must not receive the token.
        is_own = urlsplit(url)[:2] == urlsplit(self.endpoint)[:2]
        own: dict[str, Any] = build_hf_headers(token=(is_own and self.token) or False, library_name="enginehouse")
        session = get_session()
        request = session.build_request(
            "GET", url, headers={**own, "Accept-Encoding": "identity", **headers}, timeout=self.timeout_s
        )
        return session.send(request, stream=True, follow_redirects=False)


def _read(response: Response) -> bytes:
    """Return the body of a response; raises ValueError if it exceeds the limits of size or time."""
    pieces, left, ends = [], _MAX_LISTING_BYTES, time.monotonic() + _MAX_LISTING_S
    for piece in response.iter_raw():
        left -= len(piece)
        if left < 0 or time.monotonic() > ends:
            raise ValueError(f"more than {_MAX_LISTING_BYTES} bytes or {_MAX_LISTING_S:g} seconds for a list of files")
        pieces.append(piece)
    return b"".join(pieces)
