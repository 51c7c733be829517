"""``[server]``: the HTTP server, its addresses, and its behaviour towards clients.

A part of ``config``.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, le

from enginehouse.settings.profiles import ProfileName
from enginehouse.settings.reload import LIVE, SERVER


def _check_origins(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    """Reject origins without a scheme or with a path: browsers never send these."""
    for origin in value:
        if origin not in ("*", "null") and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?", origin):
            raise ValueError(f"'{attribute.name}' must hold origins such as https://app.example, not {origin!r}")


def _check_hosts(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    """Reject names with a port or brackets: the Host header is compared without them, so they would never match."""
    for host in value:
        is_address = host.count(":") > 1 and not host.startswith("[")
        if not host or re.search(r"[/\s@\[\]]", host) or (":" in host and not is_address):
            raise ValueError(f"'{attribute.name}' must hold names such as app.example, without a port, not {host!r}")


def _check_mode(_: object, attribute: Any, value: str) -> None:
    if not re.fullmatch("0?[0-7]{3}", value):
        raise ValueError(f"'{attribute.name}' must be a mode in octal digits such as \"660\", not {value!r}")


def _check_root_path(_: object, attribute: Any, value: str) -> None:
    if value and not re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+", value):
        raise ValueError(f"'{attribute.name}' must be a path such as /llm, without a slash at its end, not {value!r}")


def _without_brackets(host: str) -> str:
    """Return an IPv6 address without the brackets of its URL form."""
    return host[1:-1] if isinstance(host, str) and re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\]", host) else host


@lru_cache(maxsize=256)  # asked with every request
def is_loopback(host: str) -> bool:
    """Return True if a server that listens on ``host`` can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@frozen(kw_only=True)
class ServerSettings:
    """``[server]``: the HTTP server.

    Attributes:
        host: address to listen on; IPv6 addresses may be in brackets. For addresses other than loopback the server
            needs ``auth.keys`` or ``insecure``.
        port: TCP port; 0 selects a free one.
        extra_ports: further TCP ports on ``host`` with the same addresses and rules, such as 11434, at which clients
            of Ollama expect a server.
        uds: path of a Unix domain socket to listen on instead of ``host`` and ``port``; a relative name is relative to
            the configuration file. It is removed at shutdown, and replaced at startup if no server listens on it.
        uds_mode: mode of that file in octal digits, which controls access. Without keys, every user who may connect may
            also use ``/admin``.
        ssl_certfile: PEM file with the certificate chain; enables HTTPS and disables HTTP. A new one is read at the
            next start.
        ssl_keyfile: PEM file with its private key; unset means that ``ssl_certfile`` contains the key.
        ssl_keyfile_password: password of an encrypted private key.
        ssl_ca_certs: PEM file with certificate authorities; clients must then present a certificate issued by one of
            them.
        root_path: path prefix under which a proxy exposes this server, such as ``/llm``. Requests are accepted with and
            without the prefix, so the proxy may strip it or not; the OpenAPI document includes it.
        allowed_hosts: further names accepted in the Host header, such as ``host.docker.internal``; loopback names and
            ``host`` are always accepted.
        cors_origins: web origins (``https://app.example``) whose pages may call this server; ``*`` is all origins.
        insecure: listen on addresses other than loopback without keys; anyone who reaches the port can use the models.
            Routes below ``/admin`` are available to this machine only.
        unsupported_parameters: ``reject`` answers 400 to a known field that is not supported, ``report`` serves the
            request and lists the field in a response header.
        profile: the API profile (defaults, names and shapes), unless the request path or the key selects another.
        surfaces: names of the APIs that this server speaks; unset means all: ``openai`` and those of installed plugins.
        log_format: ``text`` writes human-readable log lines, ``json`` one JSON object per line.
        show_prompts: show the prompts of running requests to keys with the scope ``admin``, and include in the details
            of their answers the cached token at which a prompt diverges from the prefix cache. Without keys, show them
            to this machine only.
        key_metrics: label metrics by the names of the API keys.
        log_prompts: write the prompts of requests that ask for it (``log_prompt``) to the logger
            ``enginehouse.prompts``. No prompt is logged unless both this setting and the field are set.
        details: add the member ``enginehouse`` (effective values, times) to every response; otherwise only to requests
            with the header ``X-Enginehouse-Details: true``.
        reasoning_field: field of messages and deltas that carries reasoning; ``both`` sends it twice.
        ping_s: interval in seconds of the comments that keep a stream open while its request waits.
        head_timeout_s: time limit in seconds for a request line and its headers; then status 408.
        body_timeout_s: time limit in seconds for a request body; then status 408.
        shutdown_s: time in seconds for running requests to finish after SIGTERM.
        ui: serve the pages of plugins at ``/ui/``, and redirect browsers to them from ``/``; unset means only if the
            server listens on a loopback address or a Unix domain socket. Their files need no key; what they show does.
        pull: download missing hub models when the server starts.
        pull_on_request: download the files of a configured hub model with the first request for it, which waits for
            ``limits.load_wait_s`` at most; otherwise requests never cause a download.
        models_dir: folders whose models are served by name, each loaded by its first request; a path or a list of
            paths, also of the hub's cache. Read again at each reload. See models.md.
        allowed_sources: hub ids that administrators may add and download while the server runs, such as ``Qwen/*``,
            where ``*`` matches any characters. Models in ``models_dir`` may always be added, other paths never.
    """

    host: str = field(default="127.0.0.1", converter=_without_brackets, metadata=SERVER)
    port: int = field(default=8080, validator=[ge(0), le(65535)], metadata=SERVER)
    extra_ports: tuple[int, ...] = field(default=(), validator=deep_iterable(and_(ge(0), le(65535))), metadata=SERVER)
    uds: str | None = field(default=None, metadata=SERVER)
    uds_mode: str = field(default="600", validator=_check_mode, metadata=SERVER)
    ssl_certfile: str | None = field(default=None, metadata=SERVER)
    ssl_keyfile: str | None = field(default=None, metadata=SERVER)
    ssl_keyfile_password: str | None = field(default=None, repr=False, metadata=SERVER)
    ssl_ca_certs: str | None = field(default=None, metadata=SERVER)
    root_path: str = field(default="", validator=_check_root_path, metadata=LIVE)
    allowed_hosts: tuple[str, ...] = field(default=(), validator=_check_hosts, metadata=LIVE)
    cors_origins: tuple[str, ...] = field(default=(), validator=_check_origins, metadata=LIVE)
    insecure: bool = field(default=False, metadata=LIVE)
    unsupported_parameters: Literal["reject", "report"] = field(default="reject", metadata=LIVE)
    profile: ProfileName = field(default="openai", metadata=LIVE)
    surfaces: tuple[str, ...] | None = field(default=None, metadata=LIVE)
    log_format: Literal["text", "json"] = field(default="text", metadata=SERVER)
    show_prompts: bool = field(default=False, metadata=LIVE)
    key_metrics: bool = field(default=False, metadata=LIVE)
    log_prompts: bool = field(default=False, metadata=LIVE)
    details: bool = field(default=False, metadata=LIVE)
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = field(
        default="reasoning_content", metadata=LIVE
    )
    ping_s: float = field(default=10.0, validator=gt(0), metadata=LIVE)
    head_timeout_s: float = field(default=15.0, validator=gt(0), metadata=SERVER)
    body_timeout_s: float = field(default=120.0, validator=gt(0), metadata=SERVER)
    shutdown_s: float = field(default=10.0, validator=ge(0), metadata=LIVE)
    ui: bool | None = field(default=None, metadata=LIVE)
    pull: bool = field(default=False, metadata=SERVER)
    pull_on_request: bool = field(default=False, metadata=LIVE)
    models_dir: tuple[str, ...] = field(default=(), metadata=LIVE)
    allowed_sources: tuple[str, ...] = field(default=(), metadata=LIVE)

    @property
    def has_pages(self) -> bool:
        """True if the pages of plugins are served."""
        return self.uds is not None or is_loopback(self.host) if self.ui is None else self.ui

    @property
    def may_gain_models(self) -> bool:
        """True if models may be added to the running server, so that it may start without any."""
        return bool(self.models_dir or self.allowed_sources)
