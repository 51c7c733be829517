"""The keys that tokens are verified with. Files are read again when they change."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from enginehouse.errors import PluginError
from enginehouse_jwt.options import JwtOptions

__all__ = ["key_for"]


def key_for(header: dict[str, Any], options: JwtOptions) -> Any:
    """The key for a token with that header, as PyJWT takes it; None when the issuer has no such key.

    Raises:
        PluginError: the settings name no key, or it cannot be read.
    """
    if options.jwks_file is not None:
        return _in_set(_read(options.jwks_file), header.get("kid"))
    if options.public_key_file is not None:
        return _read(options.public_key_file)
    secret = options.secret if options.secret_env is None else os.environ.get(options.secret_env)
    if not secret:
        where = options.secret_env or "one of secret, secret_env, public_key_file and jwks_file in [plugins.jwt]"
        raise PluginError(f"there is no key to verify tokens with: set {where}", "jwt")
    if len(secret.encode()) < options.min_secret_bytes:
        raise PluginError(f"{options.secret_env} must have at least {options.min_secret_bytes} bytes", "jwt")
    return secret


def _in_set(text: str, key_id: Any) -> Any:
    """The key of that id; without an id, the only one."""
    keys = _parse(text)
    if key_id is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(key_id) if isinstance(key_id, str) else None


@lru_cache(maxsize=4)
def _parse(text: str) -> dict[str | None, Any]:
    """Keys by id; keys that are shared secrets have no place in a published set and are left out."""
    import jwt  # noqa: PLC0415 - the library is imported when the first token comes

    try:
        found = [entry for entry in json.loads(text)["keys"] if entry.get("kty") != "oct"]
        return {entry.get("kid"): jwt.PyJWK(entry).key for entry in found}
    except (ValueError, TypeError, KeyError, AttributeError, jwt.PyJWTError) as error:
        raise PluginError(f"the key set is wrong: {error}", "jwt") from error


def _read(name: str) -> str:
    path = Path(name).expanduser()
    try:
        found = path.stat()
        return _text(path, found.st_mtime_ns, found.st_size, found.st_ino)
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"cannot read {path}: {error}", "jwt") from error


@lru_cache(maxsize=4)
def _text(path: Path, changed_ns: int, size: int, inode: int) -> str:
    """The file's text; what else is given tells one state of the file from another."""
    return path.read_text(encoding="utf-8")
