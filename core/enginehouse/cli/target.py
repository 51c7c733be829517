"""Connections of commands to a running server: one request to its admin API, or a model and requests to it.

Addresses are ``http://host:port``, ``https://host:port`` or ``unix:path``. A Unix domain socket also serves paths, so
its URL is ``http+unix://`` with the percent-encoded path of the socket as host, the form that other programs use;
:func:`full_url` makes it. Refusals are mapped to our exceptions.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse.contract.types import Task

_UNIX = "http+unix"
_SCHEMES = ("http", "https", _UNIX)


def full_url(text: str) -> str | None:
    """Return the URL of a server given by a user, without a trailing slash; None if it is not one."""
    if text.startswith("unix:"):
        text = f"{_UNIX}://{quote(text.removeprefix('unix:').removeprefix('//'), safe='')}"
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    return text.rstrip("/") if parts.scheme in _SCHEMES and parts.netloc else None


def connection_to(url: str, timeout_s: float | None) -> http.client.HTTPConnection:
    """Return a connection to the server of ``url``, opened with the first request.

    Certificates are checked against those that the system trusts, or the variable ``SSL_CERT_FILE``.
    """
    parts = urlsplit(url)
    if parts.scheme == _UNIX:
        return _UnixConnection(unquote(parts.netloc), timeout_s)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


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


_CONNECT_TIMEOUT_S = 30.0
_MAX_SHOWN_CHARS = 120
_MAX_ANSWER_BYTES = 64 * 2**20


class OutOfTime(Exception):
    """The deadline of the check has passed."""


@frozen
class Answer:
    """One HTTP response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    first_byte_s: float = 0.0
    total_s: float = 0.0

    def json(self) -> Any:
        """Return the parsed body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def shown(self) -> str:
        """Return a summary for messages: the error's message, the answer's text, else the start of the body."""
        data = self.json()
        if isinstance(data, dict):
            error = data.get("error", data.get("detail"))
            said = error.get("message") if isinstance(error, dict) else error
            if said is None and isinstance(data.get("choices"), list):
                return f"{self.status} and an answer"
            if isinstance(said, str) and said:
                return _short(f"{self.status}: {said}")
        return _short(f"{self.status} {self.body[:400].decode('utf-8', 'replace')}")


@define
class Target:
    """A server and one of its models.

    Attributes:
        url: base URL; ``/chat/completions`` is appended to it.
        deadline: end of the running check, in the time of ``time.monotonic``.
        entry: the model's entry in the list of models.
        origin: a web origin that the server should allow, for checks of CORS.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    deadline: float = float("inf")
    entry: Mapping[str, Any] = field(factory=dict)
    origin: str | None = None

    @property
    def root(self) -> str:
        """The path of ``url``, without a trailing slash."""
        return urlsplit(self.url).path.rstrip("/")

    def with_deadline(self, seconds: float) -> Target:
        """Return the same server for a check that starts now."""
        return evolve(self, deadline=time.monotonic() + seconds)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        has_key: bool = True,
    ) -> Answer:
        """Send any request; ``path`` is absolute on the server.

        Raises:
            OutOfTime: the deadline has passed.
            OSError, http.client.HTTPException: the connection failed.
        """
        began = time.monotonic()
        with closing(self._connect()) as connection:
            response = self._request(connection, method, path, body, headers=headers, has_key=has_key)
            first = response.read(1)
            first_byte_s = time.monotonic() - began
            chunks = [first, *self._chunks(connection, response)]
            return _answer(response, b"".join(chunks), first_byte_s, time.monotonic() - began)

    def post(self, path: str, data: Any) -> Answer:
        """POST JSON; ``path`` is relative to the API's base URL."""
        return self.send("POST", self.root + path, _encode(data))

    def get(self, path: str) -> Answer:
        """GET ``path``, relative to the API's base URL."""
        return self.send("GET", self.root + path)

    def begin(self, path: str, data: Any, num_bytes: int) -> int:
        """POST JSON, read the first bytes of the response, and disconnect. Return the status."""
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", self.root + path, _encode(data))
            response.read(num_bytes)
            return response.status

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a plain greedy chat; fields that are None are sent as null."""
        messages = [{"role": "user", "content": "Say something about the sea."}]
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}

    def text_body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a plain greedy text completion."""
        return {"model": self.model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **fields}

    def chat(self, **fields: Any) -> Answer:
        """Send a chat request."""
        return self.post("/chat/completions", self.chat_body(**fields))

    def complete(self, **fields: Any) -> Answer:
        """Send a text completion request."""
        return self.post("/completions", self.text_body(**fields))

    def left_s(self) -> float:
        """Return the seconds until the deadline; raises OutOfTime."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return min(left, 3600.0)

    def _connect(self) -> http.client.HTTPConnection:
        return connection_to(self.url, self.left_s())

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        *,
        headers: Mapping[str, str] | None = None,
        has_key: bool = True,
    ) -> http.client.HTTPResponse:
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if self.key is not None and has_key:
            sent["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, path, body, {**sent, **(headers or {})})
            return connection.getresponse()
        except TimeoutError as error:
            raise OutOfTime from error

    def _chunks(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
        left = _MAX_ANSWER_BYTES
        while left > 0:
            if connection.sock is not None:
                connection.sock.settimeout(self.left_s())
            try:
                chunk = response.read1(65536)
            except TimeoutError as error:
                raise OutOfTime from error
            if not chunk:
                return
            left -= len(chunk)
            yield chunk
        raise http.client.HTTPException(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")


def connect(
    url: str, model: str | None = None, key: str | None = None, origin: str | None = None, *, task: Task = "generate"
) -> Target:
    """Connect to a server: read its list of models and select one.

    Args:
        url: the server; ``/v1`` is added if it has no path.
        model: the model to use; None for the first one listed that is for the task, or whose task is not told; if there
            is none, for the first one.
        task: what it will be asked for.

    Raises:
        ConfigError: the server or the model does not exist.
    """
    whole = full_url(url)
    if whole is None:
        raise ConfigError(f"{url!r} is not an address; write http://host:port/v1, or unix:path for a socket file")
    url = whole if urlsplit(whole).path else f"{whole}/v1"
    target = Target(url, "", key, origin=origin)
    try:
        answer = target.with_deadline(_CONNECT_TIMEOUT_S).get("/models")
    except (OSError, OutOfTime, http.client.HTTPException) as error:
        raise ConfigError(f"{url} cannot be reached: {error}") from error
    data = answer.json()
    entries = data.get("data") if isinstance(data, dict) else None
    listed = [entry for entry in entries or () if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if answer.status != 200 or not listed:
        raise ConfigError(f"{url}/models lists no models: {answer.shown()}")
    named = [entry for entry in listed if model in (None, entry["id"])]
    entry = next((entry for entry in named if entry.get("task", task) == task), named[0] if named else None)
    if entry is None:
        raise ConfigError(f"{url} serves no model {model!r}; it serves {', '.join(entry['id'] for entry in listed)}")
    return evolve(target, model=entry["id"], entry=entry)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _encode(data: Any) -> bytes:
    return json.dumps(data).encode()


def _answer(response: http.client.HTTPResponse, body: bytes, first_byte_s: float, total_s: float) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body, first_byte_s, total_s)
