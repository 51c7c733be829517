"""One line of a key file: a name, a hash, and what the key may do as ``option=value`` words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, get_args

from attrs import fields, frozen

from enginehouse.api.http.keys.hashing import read_hash
from enginehouse.api.http.keys.ring import KeyRecord
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.identity import Scope, read_moment
from enginehouse.settings.profiles import PROFILES
from enginehouse.settings.structuring import closest

__all__ = ["KeyOptions", "key_line", "read_line"]


@frozen(kw_only=True)
class KeyOptions:
    """What a line says besides the name and the hash, as text; None is not said. Names are those in the file."""

    scopes: str | None = None
    profile: str | None = None
    namespace: str | None = None
    models: str | None = None
    rpm: str | None = None
    tpm: str | None = None
    concurrent: str | None = None
    priority: str | None = None
    expires: str | None = None


_NAMES = tuple(attribute.name for attribute in fields(KeyOptions))


def key_line(
    name: str,
    hashed: str,
    scopes: Sequence[str] = ("infer",),
    profile: str | None = None,
    namespace: str | None = None,
    **options: str | None,
) -> str:
    """A line of a key file; ``options`` are further fields of :class:`KeyOptions`.

    Raises:
        ConfigError: a part is wrong, so that the server would refuse the file.
    """
    said = {"scopes": ",".join(scopes), "profile": profile, "namespace": namespace, **options}
    words = [name, hashed, *(f"{option}={value}" for option, value in said.items() if value)]
    if name.startswith("#") or any(len(word.split()) != 1 for word in words):
        raise ConfigError("names and namespaces are words without spaces, and a name does not begin with '#'")
    try:
        read_line(words)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return " ".join(words)


def read_line(words: Sequence[str]) -> KeyRecord:
    """One line, split at spaces. Its hash is not quoted in messages: it may be a key that was left there by mistake.

    Raises:
        ValueError: says what is wrong.
    """
    if len(words) < 2:
        raise ValueError("must be a name, a hash and options, with spaces between them")
    name, hashed, *rest = words
    if not all(word.isprintable() for word in words):
        raise ValueError("holds characters that cannot be printed")
    found = read_hash(hashed)
    if found is None:
        raise ValueError("the second word must be a hash as 'enginehouse keys hash' writes it")
    said = _read_options(rest)
    return KeyRecord(
        name=name,
        salt=found[0],
        digest=found[1],
        scopes=frozenset(_known("scope", (said.scopes or "infer").split(","), get_args(Scope))),
        models=_read_models(said.models),
        profile=None if said.profile is None else _known("profile", [said.profile], tuple(PROFILES))[0],
        namespace=said.namespace or name,
        requests_per_minute=_read_count("rpm", said.rpm),
        tokens_per_minute=_read_count("tpm", said.tpm),
        max_concurrent=_read_count("concurrent", said.concurrent),
        priority=_read_priority(said.priority),
        expires=_read_expiry(said.expires),
    )


def _read_options(words: Sequence[str]) -> KeyOptions:
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if option not in _NAMES:
            raise ValueError(f"unknown option {option!r}{closest(option, _NAMES)}")
        if not equals or not value or option in options:
            raise ValueError(f"the option {option!r} needs one value")
        options[option] = value
    return KeyOptions(**options)


def _known(noun: str, given: Sequence[str], known: Sequence[str]) -> Sequence[Any]:
    """``given``, all of which must be known."""
    unknown = next((value for value in given if value not in known), None)
    if unknown is not None:
        raise ValueError(f"unknown {noun} {unknown!r}; there are {', '.join(known)}")
    return given


def _read_models(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = text.split(",")
    if not all(names):
        raise ValueError("the option 'models' needs names of models with commas between them")
    return frozenset(names)


def _read_count(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError(f"the option {option!r} must be a whole number of at least 1, not {text!r}")
    return int(text)


def _read_priority(text: str | None) -> int:
    digits = (text or "0").removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or int(digits) >= 2**31:
        raise ValueError(f"the option 'priority' must be a whole number, not {text!r}")
    return int(text or "0")


def _read_expiry(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return read_moment(text)
    except ValueError as error:
        raise ValueError(f"the option 'expires' {error}") from None
