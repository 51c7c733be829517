"""The keys that a server knows, and the search for the one that was given."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Iterator

from attrs import field, frozen

from enginehouse.api.http.keys.hashing import digest_of
from enginehouse.contract.identity import Identity
from enginehouse.settings.auth import MAX_KEY_BYTES

__all__ = ["KeyRecord", "KeyRing"]


@frozen(kw_only=True)
class KeyRecord(Identity):
    """One key and its owner.

    Attributes:
        salt: 16 bytes.
        digest: of the key with that salt.
    """

    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)


class KeyRing:
    """All keys of a server.

    Args:
        records: with different names.
    """

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self._by_salt: dict[bytes, list[KeyRecord]] = {}
        for record in records:
            self._by_salt.setdefault(record.salt, []).append(record)

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys."""
        return not self._by_salt

    def unknown_models(self, served: Collection[str]) -> Iterator[tuple[str, str]]:
        """Names of keys, each with a model that it may use and that is not among ``served``, names and aliases."""
        for records in self._by_salt.values():
            for record in records:
                yield from ((record.name, model) for model in sorted(record.models or ()) if model not in served)

    def find(self, given: bytes) -> KeyRecord | None:
        """The record of a key. Every record is compared, on bytes of equal length, so that time tells nothing."""
        if len(given) > MAX_KEY_BYTES:
            return None
        found = None
        for salt, records in self._by_salt.items():
            digest = digest_of(given, salt)
            for record in records:
                if hmac.compare_digest(digest, record.digest):
                    found = record
        return found
