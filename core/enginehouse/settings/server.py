"""``[server]``: the HTTP server, its addresses, and how it treats those who call.

A part of ``config``.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, le

from enginehouse.settings.profiles import ProfileName

__all__ = ["ServerSettings"]


def _check_origins(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    """An origin without its scheme, or with a path, would never be the one that a browser sends."""
    for origin in value:
        if origin not in ("*", "null") and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+/?", origin):
            raise ValueError(f"'{attribute.name}' must hold origins such as https://app.example, not {origin!r}")


def _check_hosts(_: object, attribute: Any, value: tuple[str, ...]) -> None:
    """The Host header is compared without its port and brackets, so names that have them would never match."""
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
    """An IPv6 address as the system takes it, where it is written as in a URL."""
    return host[1:-1] if isinstance(host, str) and re.fullmatch(r"\[[^\[\]]*:[^\[\]]*\]", host) else host


@frozen(kw_only=True)
class ServerSettings:
    """``[server]``: the HTTP server.

    Attributes:
        host: address to listen on; IPv6 addresses may be in brackets. Beyond loopback the server needs ``auth.keys`` or
            ``insecure``.
        port: TCP port; 0 takes any free one.
        uds: file of a Unix domain socket to listen on instead of ``host`` and ``port``; a relative name is relative to
            the configuration file. It is removed at the end, and replaced at the start if no server listens on it.
        uds_mode: mode of that file in octal digits: who may connect. Without keys all of these may also use ``/admin``.
        ssl_certfile: PEM file with the certificate and its chain; the port then speaks HTTPS only. A renewed one is
            read at the next start.
        ssl_keyfile: PEM file with its private key; unset: it is in ``ssl_certfile`` as well.
        ssl_keyfile_password: password of an encrypted key.
        ssl_ca_certs: PEM file with authorities; clients then need a certificate of one of these.
        root_path: path below which a proxy exposes this server, such as ``/llm``. Requests are accepted with and
            without it, so the proxy may remove it or keep it; the OpenAPI document names it.
        allowed_hosts: further names that the Host header may carry, such as ``host.docker.internal``; loopback and
            ``host`` always may.
        cors_origins: web origins (``https://app.example``) whose pages may call this server; ``*`` is all of them.
        insecure: listen beyond loopback without keys; anyone who reaches the port can use the models. What stands below
            ``/admin`` is answered to this machine only.
        unsupported_parameters: ``reject`` answers 400 to a known field that cannot be honoured, ``report``
            serves the request and lists the field in a response header.
        profile: the API whose defaults, names and shapes hold where neither the address nor the key names another.
        log_format: ``text`` writes log lines for people, ``json`` one JSON object per line.
        show_prompts: show the prompts of running requests to keys with the scope ``admin``, and in the details of
            their answers what the prefix cache holds where a prompt leaves it. Without keys, to this machine.
        key_metrics: let metrics tell the API keys apart, by their names.
        log_prompts: write the prompts of requests that ask for it (``log_prompt``) to the logger
            ``enginehouse.prompts``. Without both no prompt is logged.
        details: add the member ``enginehouse`` to every answer (effective values, times); otherwise only to those
            whose request has the header ``X-Enginehouse-Details: true``.
        reasoning_field: where reasoning stands in messages and deltas; ``both`` sends it twice.
        ping_s: seconds between the comments that keep a stream open while its request waits.
        head_timeout_s: seconds in which a request's first line and headers must arrive; then 408.
        body_timeout_s: seconds in which a request's body must arrive; then 408.
        shutdown_s: seconds that running requests get to finish after SIGTERM.
        pull: download models of the hub that are not here when the server starts. Requests never cause a download.
    """

    host: str = field(default="127.0.0.1", converter=_without_brackets)
    port: int = field(default=8080, validator=[ge(0), le(65535)])
    uds: str | None = None
    uds_mode: str = field(default="600", validator=_check_mode)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    root_path: str = field(default="", validator=_check_root_path)
    allowed_hosts: tuple[str, ...] = field(default=(), validator=_check_hosts)
    cors_origins: tuple[str, ...] = field(default=(), validator=_check_origins)
    insecure: bool = False
    unsupported_parameters: Literal["reject", "report"] = "reject"
    profile: ProfileName = "openai"
    log_format: Literal["text", "json"] = "text"
    show_prompts: bool = False
    key_metrics: bool = False
    log_prompts: bool = False
    details: bool = False
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"
    ping_s: float = field(default=10.0, validator=gt(0))
    head_timeout_s: float = field(default=15.0, validator=gt(0))
    body_timeout_s: float = field(default=120.0, validator=gt(0))
    shutdown_s: float = field(default=10.0, validator=ge(0))
    pull: bool = False
