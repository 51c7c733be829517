"""Keys for verifying tokens. Files are reloaded when they change."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import PluginError
from enginehouse.contract.regular_files import check_regular, read_regular_text
from enginehouse_jwt.options import JwtOptions

__all__ = ["key_for"]

_log = logging.getLogger(__name__)

_MAX_BYTES = 1024 * 1024
_MAX_KEYS = 1000
_MAX_TOLD = 10
_MIN_RSA_BITS = 2048
_MAX_MODULUS_CHARS = 2732  # 16384 bits in base64: larger keys are slow to verify with, and OpenSSL refuses them

# Only these members form a public key. Other members of an entry, private parts included, are not read.
_PUBLIC_MEMBERS: Mapping[str, tuple[str, ...]] = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
_CURVES: Mapping[str, str] = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}
_KINDS: Mapping[str, str] = {
    **{f"{padding}{bits}": "RSA" for padding in ("RS", "PS") for bits in (256, 384, 512)},
    **dict.fromkeys(_CURVES, "EC"),
    "EdDSA": "OKP",
}
"""Key type of each signature algorithm."""


@frozen
class _Key:
    """A verification key of a set.

    Attributes:
        algorithm: the only algorithm that it may be used for, if the set declares one.
        curve: curve of an elliptic key.
    """

    id: str | None
    kind: str
    curve: str | None
    algorithm: str | None
    public: Any

    def fits(self, algorithm: str) -> bool:
        """True if it can verify tokens signed with ``algorithm``."""
        if self.kind != _KINDS.get(algorithm) or self.algorithm not in (None, algorithm):
            return False
        return self.kind != "EC" or self.curve == _CURVES.get(algorithm)


def key_for(header: dict[str, Any], options: JwtOptions) -> Any:
    """Return the key for a token with that header, as PyJWT expects it; None if the issuer has no such key.

    Raises:
        PluginError: the settings name no key, or it cannot be read.
    """
    if options.jwks_file is not None:
        return _in_set(_read(options.jwks_file), options.jwks_file, header)
    if options.public_key_file is not None:
        return _in_file(_read(options.public_key_file), options, header)
    secret = options.secret if options.secret_env is None else os.environ.get(options.secret_env)
    if not secret:
        where = options.secret_env or "one of secret, secret_env, public_key_file and jwks_file in [plugins.jwt]"
        raise PluginError(f"no key to verify tokens with: set {where}", "jwt")
    if len(secret.encode()) < options.min_secret_bytes:
        raise PluginError(f"{options.secret_env} must have at least {options.min_secret_bytes} bytes", "jwt")
    return secret


def _in_set(text: str, name: str, header: Mapping[str, Any]) -> Any:
    """Return the key with that id that fits the algorithm; without an id, the only one that does."""
    keys = _parse(text, name)
    if isinstance(keys, str):
        raise PluginError(keys, "jwt")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or not (key_id is None or isinstance(key_id, str)):
        return None
    fitting = [key for key in keys if key.fits(algorithm) and key_id in (None, key.id)]
    return fitting[0].public if fitting and (key_id is not None or len(fitting) == 1) else None


def _in_file(text: str, options: JwtOptions, header: Mapping[str, Any]) -> Any:
    """Return the key of a file if it fits the algorithm of the token; it must fit one that is allowed."""
    if not any(_prepare(text, algorithm) for algorithm in options.allowed):
        algorithms = ", ".join(options.allowed)
        raise PluginError(
            f"{options.public_key_file} holds no public key (PEM; RSA with 2048 bits or more) for {algorithms}", "jwt"
        )
    algorithm = header.get("alg")
    return _prepare(text, algorithm) if algorithm in options.allowed else None


@lru_cache(maxsize=32)
def _prepare(text: str, algorithm: str) -> Any:
    """Return the key as that algorithm expects it; None if it is of another type."""
    import jwt  # noqa: PLC0415 - the library is imported when the first token comes

    try:
        key: Any = jwt.PyJWS().get_algorithm_by_name(algorithm).prepare_key(text)
    except (jwt.PyJWTError, NotImplementedError, ValueError, TypeError):
        return None
    key = key.public_key() if hasattr(key, "public_key") else key
    return None if _is_short(key) else key


@lru_cache(maxsize=4)
def _parse(text: str, name: str) -> tuple[_Key, ...] | str:
    """Return the usable keys, or the error of the set. Other keys are skipped, which is logged once per text."""
    try:
        entries = json.loads(text)["keys"]
        if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
            raise ValueError(f"its 'keys' must be a list of at most {_MAX_KEYS}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return f"the key set is wrong: {name}: {error!r}"
    keys: list[_Key] = []
    left_out: list[str] = []
    for number, entry in enumerate(entries):
        try:
            keys.append(_key_of(entry))
        except ValueError as error:
            # A lone surrogate, which JSON may contain, could not be written to a log in UTF-8.
            said = str(error).encode("utf-8", "backslashreplace").decode()
            left_out.append(f"keys[{number}]: {said}")
    shown = "; ".join(left_out[:_MAX_TOLD]) + (f"; and {len(left_out) - _MAX_TOLD} more" * (len(left_out) > _MAX_TOLD))
    if not keys:
        return f"the key set {name} holds no key that can verify a token" + (f" ({shown})" if shown else "")
    if left_out:
        _log.warning("the key set %s holds keys that verify no tokens here; they are left out: %s", name, shown)
    return tuple(keys)


def _key_of(entry: Any) -> _Key:
    """Return a key of a set; raises ValueError, with the reason, if it cannot verify."""
    import jwt  # noqa: PLC0415 - the library is imported when the first token comes

    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    kind, key_id, algorithm = entry.get("kty"), entry.get("kid"), entry.get("alg")
    if kind == "oct":
        raise ValueError("a shared secret has no place in a published set")
    if not isinstance(kind, str) or kind not in _PUBLIC_MEMBERS:
        raise ValueError(f"its kind {str(kind)[:20]!r} is not known")
    operations = entry.get("key_ops") or ["verify"]
    if entry.get("use") not in (None, "sig") or not isinstance(operations, list) or "verify" not in operations:
        raise ValueError("it is not for signatures")
    if not (key_id is None or isinstance(key_id, str)):
        raise ValueError("its kid is not a text")
    if not (algorithm is None or (isinstance(algorithm, str) and _KINDS.get(algorithm) == kind)):
        raise ValueError(f"its algorithm {str(algorithm)[:20]!r} verifies no tokens")
    members = {name: entry.get(name) for name in _PUBLIC_MEMBERS[kind]}
    if not all(isinstance(value, str) and len(value) <= _MAX_MODULUS_CHARS for value in members.values()):
        raise ValueError(f"{', '.join(members)} must be texts of at most {_MAX_MODULUS_CHARS} characters")
    try:
        public = jwt.PyJWK({"kty": kind, **members}).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it cannot be read: {str(error)[:100]}") from error
    if _is_short(public):
        raise ValueError(f"it has {public.key_size} bits, fewer than {_MIN_RSA_BITS}")
    return _Key(key_id, kind, members.get("crv"), algorithm, public)


def _is_short(key: Any) -> bool:
    """True if it is an RSA key that RFC 7518 forbids, because its private part can be computed."""
    return hasattr(key, "encrypt") and key.key_size < _MIN_RSA_BITS


def _read(name: str) -> str:
    path = Path(name).expanduser()
    try:
        found = check_regular(path)
        return _text(path, found.st_mtime_ns, found.st_size, found.st_ino)
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"cannot read {path}: {error}", "jwt") from error


@lru_cache(maxsize=4)
def _text(path: Path, changed_ns: int, size: int, inode: int) -> str:
    """Return the file's text; the other arguments identify one version of the file for the cache."""
    return read_regular_text(path, _MAX_BYTES)
