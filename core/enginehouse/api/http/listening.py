"""The server's listening socket: a TCP port or a Unix domain socket, and TLS over it.

Used by ``server`` and by commands that serve. All errors in the settings of an address are found here, before a model
is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
import sys
from pathlib import Path

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import ServerSettings

_BACKLOG = 2048
_PROBE_S = 1.0  # timeout for another server to accept a connection on a socket file


def listen(settings: ServerSettings) -> socket.socket:
    """Open the port, or the socket file, which is removed on close.

    Raises:
        ConfigError: it is in use, the address does not exist on this machine, or the certificate cannot be used.
    """
    tls_context(settings)
    if settings.uds is not None:
        return _open_file(Path(settings.uds), int(settings.uds_mode, 8))
    return _open_port(settings.host, settings.port, "server.port")


def listen_further(settings: ServerSettings) -> list[socket.socket]:
    """Open the further ports.

    Raises:
        ConfigError: one is in use, or the address does not exist on this machine.
    """
    opened: list[socket.socket] = []
    try:
        for port in dict.fromkeys(settings.extra_ports):
            opened.append(_open_port(settings.host, port, "server.extra_ports"))
    except ConfigError:
        for listener in opened:
            listener.close()
        raise
    return opened


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """Return ``http://host:port`` or ``https://host:port`` of an open listener, or ``unix:path``."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    scheme, (host, port) = "http" if settings.ssl_certfile is None else "https", address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context for the certificate of the settings; None without one.

    Raises:
        ConfigError: its files cannot be read or do not belong together.
    """
    if settings.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(settings, name) is not None:
                raise ConfigError(f"server.{name}: server.ssl_certfile must be set as well", f"server.{name}")
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(getattr(settings, name), f"server.{name}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    password = settings.ssl_keyfile_password or ""  # without a password, OpenSSL would prompt for one on the terminal
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: password)
    except (OSError, ValueError) as error:
        raise _unusable(settings, error) from error
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except OSError as error:
            path = "server.ssl_ca_certs"
            raise ConfigError(f"{path}: {settings.ssl_ca_certs} holds no certificates: {error}", path) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(name: str | None, path: str) -> None:
    if name is not None:
        try:
            with open(name, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{path}: cannot read {name}: {error.strerror}", path) from error


def _unusable(settings: ServerSettings, error: OSError | ValueError) -> ConfigError:
    """Return the error for a certificate or key, as specific as OpenSSL's report allows."""
    reason = getattr(error, "reason", None) or str(error)
    key = settings.ssl_keyfile or settings.ssl_certfile
    path = "server.ssl_certfile"
    if reason == "KEY_VALUES_MISMATCH":
        path = "server.ssl_keyfile"
        return ConfigError(f"{path}: {key} is not the key of the certificate in {settings.ssl_certfile}", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(settings.ssl_certfile)
    except OSError:
        return ConfigError(f"{path}: {settings.ssl_certfile} holds no certificate in PEM form ({reason})", path)
    if settings.ssl_keyfile is not None:
        path = "server.ssl_keyfile"
    message = f"{path}: the private key in {key} cannot be used ({reason}); if it is encrypted, its password must be "
    return ConfigError(f"{message}server.ssl_keyfile_password", path)


def _open_port(host: str, port: int, path: str) -> socket.socket:
    """Listen on a port, which is the setting ``path``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host!r}: {reason}", "server.host") from error
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        advice = "; choose another port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise ConfigError(f"{path}: cannot listen on {host}:{port}: {error.strerror}{advice}", path) from error
    listener.setblocking(False)
    return listener


class _UnixListener(socket.socket):
    """A Unix domain socket that removes its file when closed, unless another server has replaced that file."""

    file: tuple[str, int, int] | None = None

    def close(self) -> None:
        """Close the socket and remove its file."""
        super().close()
        if self.file is not None:
            path, device, number = self.file
            self.file = None
            with contextlib.suppress(OSError):
                found = os.stat(path)
                if (found.st_dev, found.st_ino) == (device, number):
                    os.unlink(path)


def _open_file(path: Path, mode: int) -> socket.socket:
    """Listen on a socket file with that mode; a stale file left by a killed server is replaced."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("server.uds: this system has no Unix domain sockets; remove this setting", "server.uds")
    listener = _UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        found = path.stat()
        listener.file = (str(path), found.st_dev, found.st_ino)
        path.chmod(mode)  # no connection is possible before the next line
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, ValueError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"server.uds: cannot listen on {path}: {reason}", "server.uds") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listening server.

    Raises:
        ConfigError: a server is listening, or it is another kind of file.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"server.uds: {path} exists and is not a socket; name another file", "server.uds")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass  # its queue is full, so the server is running
    raise ConfigError(f"server.uds: another server listens on {path}", "server.uds")
