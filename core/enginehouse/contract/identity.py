"""Identity of callers: the credentials that a request presents, and the permissions granted to its caller.

Created by ``keys`` from API keys and by plugins from other credentials (the hook ``authenticate``); read by the HTTP
layer. Knows neither keys nor HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from attrs import field, frozen

__all__ = ["Credentials", "Identity", "Scope", "read_moment"]

Scope = Literal["infer", "metrics", "admin"]
"""Permissions of a caller: use models, read metrics, administer the server."""


@frozen(kw_only=True)
class Credentials:
    """Credentials presented with a request.

    Attributes:
        token: of ``Authorization: Bearer``, else the header ``x-api-key``; empty if there is neither.
        headers: all headers, names in lower case; for repeated ones the first value.
        client: address of the peer, possibly a proxy's; empty if there is none.
    """

    token: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(factory=dict, repr=False)
    client: str = ""


@frozen(kw_only=True)
class Identity:
    """A caller and its permissions.

    Attributes:
        name: used in the log and for fairness: callers with different names take turns in queues.
        scopes: permissions.
        models: names and aliases of the models that it may use; None is all.
        profile: the API profile of its requests; None is the server's.
        namespace: callers of one namespace share the prefix cache; empty is a namespace of its own.
        requests_per_minute: None is the default limit per key in ``[limits]``; so are the following two.
        tokens_per_minute: of prompts and answers together.
        max_concurrent: maximum number of concurrent requests.
        priority: the most urgent (lowest) ``priority`` that its requests may ask for.
        expires: time from which it is refused; None is never.
    """

    name: str
    scopes: frozenset[Scope] = frozenset({"infer"})
    models: frozenset[str] | None = None
    profile: str | None = None
    namespace: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    priority: int = 0
    expires: datetime | None = None

    def is_expired(self, now: datetime) -> bool:
        """True if the identity is no longer valid at ``now``."""
        return self.expires is not None and now >= self.expires


def read_moment(text: str) -> datetime:
    """Parse a date or a time in ISO 8601; without a time zone it is UTC.

    Raises:
        ValueError: the text is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"must be a day or a moment such as 2030-01-31 or 2030-01-31T12:00:00Z, not {text!r}"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
