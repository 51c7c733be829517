"""``[auth]``: API keys in the settings, and the path of the file with hashes of further keys.

A part of ``config``. Keys at run time are handled by ``keys``.
"""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.identity import Scope, read_moment
from enginehouse.settings.profiles import ProfileName
from enginehouse.settings.reload import LIVE

MAX_KEY_BYTES = 1024
"""Longer keys are rejected without being compared."""


def _check_word(_: Any, attribute: Any, value: str) -> None:
    if not value or not value.isprintable() or " " in value:
        raise ValueError(f"'{attribute.name}' must be printable characters without spaces")


def _check_scopes(_: Any, attribute: Any, value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError(f"'{attribute.name}' must hold at least one scope")


def _check_models(_: Any, attribute: Any, value: tuple[str, ...] | None) -> None:
    if value is not None and not (value and all(value)):
        raise ValueError(f"'{attribute.name}' must hold names of models; leave it out to allow all")


def _check_moment(_: Any, attribute: Any, value: str | None) -> None:
    if value is not None:
        try:
            read_moment(value)
        except ValueError as error:
            raise ValueError(f"'{attribute.name}' {error}") from None


@frozen(kw_only=True)
class KeySettings:
    """``[[auth.keys]]``: one API key with its owner. A bare string in ``auth.keys`` is a key with the defaults.

    Attributes:
        name: name of the owner; shown in the log, unique.
        key: the key itself.
        scopes: permissions: ``infer`` (use the models), ``metrics`` (read metrics), ``admin`` (manage the server).
        profile: API profile of its requests; unset is ``server.profile``.
        namespace: keys of the same namespace share the prefix cache; unset is a separate namespace.
        models: names and aliases of the models that it may use; unset is all. Other models are reported as not
            existing.
        requests_per_minute: unset is ``limits.key_requests_per_minute``.
        tokens_per_minute: of prompts and answers together; unset is ``limits.key_tokens_per_minute``.
        max_concurrent: concurrent requests; unset is ``limits.key_max_concurrent``.
        priority: the most urgent (lowest) ``priority`` that its requests may ask for.
        expires: date or time (ISO 8601, UTC if without a time zone) from which it is refused; unset is never.
    """

    name: str = field(validator=_check_word)
    key: str = field(repr=False)
    scopes: tuple[Scope, ...] = field(default=("infer",), validator=_check_scopes)
    profile: ProfileName | None = None
    namespace: str | None = field(default=None, validator=optional(_check_word))
    models: tuple[str, ...] | None = field(default=None, validator=_check_models)
    requests_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    tokens_per_minute: int | None = field(default=None, validator=optional(gt(0)))
    max_concurrent: int | None = field(default=None, validator=optional(gt(0)))
    priority: int = field(default=0, validator=[ge(-(2**31)), le(2**31 - 1)])
    expires: str | None = field(default=None, validator=_check_moment)


KeyField = str | KeySettings


@frozen(kw_only=True)
class AuthSettings:
    """``[auth]``: access control.

    Attributes:
        keys: API keys, each a string or a table; with at least one, every request but ``/health`` needs one as a bearer
            token or in ``x-api-key``.
        key_file: file with hashes of further keys, reread when it changes. The path may be relative to the
            configuration file.
        authenticators: authentication plugins, asked in this order; others are never asked.
        timeout_s: maximum time in seconds for each of them to identify a caller; afterwards the request is refused with
            503, and may be sent again.
    """

    keys: tuple[str | KeySettings, ...] = field(default=(), repr=False, metadata=LIVE)
    key_file: str | None = field(default=None, metadata=LIVE)
    authenticators: tuple[str, ...] = field(default=(), metadata=LIVE)
    timeout_s: float = field(default=10.0, validator=gt(0), metadata=LIVE)

    def __attrs_post_init__(self) -> None:
        """Reject empty keys (from unset variables in deployment scripts) and duplicate names and keys."""
        names: set[str] = set()
        texts: set[str] = set()
        for index, key in enumerate(self.keys):
            path = f"auth.keys[{index}]"
            text, name = (key, f"key-{index + 1}") if isinstance(key, str) else (key.key, key.name)
            if not text.strip():
                raise ConfigError("a key is empty", path)
            if len(text.encode("utf-8", "replace")) > MAX_KEY_BYTES:
                raise ConfigError(f"a key has more than {MAX_KEY_BYTES} bytes", path)
            if name in names:
                raise ConfigError(f"the name {name!r} is taken by another key", path)
            if text in texts:
                raise ConfigError("another entry has the same key", path)
            names.add(name)
            texts.add(text)

    @property
    def needs_key(self) -> bool:
        """True if every caller needs a key or must be recognised by a plugin."""
        return bool(self.keys or self.authenticators) or self.key_file is not None
