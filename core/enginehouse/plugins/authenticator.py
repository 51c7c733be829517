"""One plugin's hook ``authenticate`` as the server asks it: whatever goes wrong there, the caller is denied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from attrs import evolve, frozen

from enginehouse.errors import PluginError
from enginehouse.identity import Credentials, Identity
from enginehouse.profiles import PROFILES

__all__ = ["Authenticator"]

_log = logging.getLogger("enginehouse.server")


@frozen
class Authenticator:
    """Recognises callers. ``ask`` is the plugin's hook."""

    plugin: str
    ask: Callable[..., Identity | None]

    def identify(self, credentials: Credentials) -> Identity | None:
        """Who it is, the plugin's name in front; None when this plugin does not know. Any thread; may block.

        Raises:
            PluginError: the plugin failed or gave what is no identity; the reason is in the log.
        """
        try:
            found = self.ask(credentials=credentials)
            if found is None:
                return None
            _check(found)
        except Exception as error:  # the border to the plugin: a caller that it stumbles over is not let in
            _log.error("the authenticator %s failed; its caller is refused", self.plugin, exc_info=error)
            raise PluginError(f"the authenticator {self.plugin!r} failed", self.plugin) from error
        name = f"{self.plugin}:{found.name}"
        return evolve(found, name=name, namespace=found.namespace or name)


def _check(found: object) -> None:
    if not isinstance(found, Identity):
        raise PluginError(f"it must give an Identity or None, not {type(found).__name__}")
    if not (found.name and found.name.isprintable() and " " not in found.name):
        raise PluginError("an identity's name must be printable characters without spaces")
    if not found.namespace.isprintable():
        raise PluginError("an identity's namespace must be printable characters")
    for limit in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        most = getattr(found, limit)
        if most is not None and most < 1:
            raise PluginError(f"an identity's {limit} must be at least 1, or None for the server's own")
    if found.profile is not None and found.profile not in PROFILES:
        raise PluginError(f"unknown profile {found.profile!r}")
    if found.is_expired(datetime.now(UTC)):
        raise PluginError("the identity has expired")
