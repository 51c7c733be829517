"""Who sends a request: what a caller shows, and what is granted to whoever it turns out to be.

Made by ``keys`` from API keys and by plugins from anything else (the hook ``authenticate``); read by the HTTP layer.
Knows neither keys nor HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from attrs import field, frozen

__all__ = ["Credentials", "Identity", "Scope", "read_moment"]

Scope = Literal["infer", "metrics", "admin"]
"""What a caller may do: use models, read figures of the server, change what it serves."""


@frozen(kw_only=True)
class Credentials:
    """What came with a request to say who sends it.

    Attributes:
        token: of ``Authorization: Bearer``, else the header ``x-api-key``; empty when neither is there.
        headers: all headers, names in lower case; of repeated ones the first.
        client: address of the peer, perhaps a proxy's; empty when there is none.
    """

    token: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(factory=dict, repr=False)
    client: str = ""


@frozen(kw_only=True)
class Identity:
    """A caller and what it may do.

    Attributes:
        name: who it is; in the log, and callers of different names take turns in queues.
        scopes: what it may do.
        models: names and aliases of the models it may use; None is all.
        profile: the API profile of its requests; None is the server's.
        namespace: callers of one namespace share the prefix cache; empty is one of its own.
        requests_per_minute: None is what ``[limits]`` says for each key; so are the following two.
        tokens_per_minute: of prompts and answers together.
        max_concurrent: requests at once.
        priority: the most urgent (lowest) ``priority`` that its requests may ask for.
        expires: from then on it is refused; None is never.
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
        """Whether it counts no more at ``now``."""
        return self.expires is not None and now >= self.expires


def read_moment(text: str) -> datetime:
    """A day or a moment in ISO 8601; without a time zone it is UTC.

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
