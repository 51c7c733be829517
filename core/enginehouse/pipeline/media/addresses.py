"""Which addresses of the network a client may make this server read: hosts by allow-list, and public addresses only.

Knows no HTTP and opens nothing. A name is checked as it is written, every address that it resolves to is checked before
one is connected to, and so is every redirect.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from attrs import frozen

__all__ = ["AddressRefused", "Target", "check_addresses", "is_allowed_host", "is_public", "read_url"]

_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 4096
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(ValueError):
    """The address is malformed, or may not be read; the message says why."""


@frozen
class Target:
    """An address taken apart. ``path`` holds the query as well."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def is_default_port(self) -> bool:
        """Whether the address need not name its port."""
        return self.port == _PORTS[self.scheme]

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.is_default_port else f"{host}:{self.port}"


def read_url(url: str) -> Target:
    """Take an http or https address apart, strictly: what two programs read in two ways is refused.

    Raises:
        AddressRefused: it is none.
    """
    if len(url) > _MAX_URL_CHARS:
        raise AddressRefused(f"an address has at most {_MAX_URL_CHARS} characters")
    if not re.fullmatch(r"[!-\[\]-~]+", url):  # printable ASCII without space and backslash
        raise AddressRefused("it is not an http, https or data URL")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").removesuffix(".")
    except ValueError as error:
        raise AddressRefused("it is not an http, https or data URL") from error
    if parts.scheme not in _PORTS or not host:
        raise AddressRefused("it is not an http, https or data URL")
    if parts.username is not None or parts.password is not None:
        raise AddressRefused("an address with a user name is not read")
    if not (_HOST.fullmatch(host) or (parts.netloc.startswith("[") and ":" in host and "%" not in host)):
        raise AddressRefused("its host is malformed")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def is_allowed_host(target: Target, allowed: Iterable[str]) -> bool:
    """Whether the settings list a target's host.

    Args:
        allowed: ``images.example``, ``.example.org`` for all names below it, ``*`` for every host; with ``:8080``
            behind for a port of its own, without one for the usual port.
    """
    for entry in allowed:
        host, colon, port = entry.rpartition(":") if re.search(r":\d+$", entry) else (entry, "", "")
        if int(port) != target.port if colon else not target.is_default_port:
            continue
        host = host.lower().strip("[]")
        if host in ("*", target.host) or (host.startswith(".") and target.host.endswith(host)):
            return True
    return False


def check_addresses(addresses: Iterable[str], *, allow_private: bool) -> list[str]:
    """The addresses of a host, all of which may be connected to.

    Raises:
        AddressRefused: one of them may not. A host that has both kinds is likely to be an attack.
    """
    found = list(dict.fromkeys(addresses))
    if not found:
        raise AddressRefused("its host has no address")
    if not allow_private and not all(map(is_public, found)):
        raise AddressRefused("its host is not on the public internet (media.allow_private)")
    return found


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet, also when it is wrapped in one of IPv6."""
    found: _Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved and not found.is_unspecified
