"""Wrapper of a plugin's ``authenticate`` hook that refuses the caller if anything fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import EnginehouseError, PluginError
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.settings.profiles import PROFILES

__all__ = ["Authenticator"]

_log = logging.getLogger("enginehouse.server")


_MAX_TOLD = 100


@define(eq=False)
class _Told:
    """Failures that are already in the log: an error in the settings would otherwise fill it on every request."""

    _seen: set[tuple[str, ...]] = field(factory=set)

    def is_new(self, error: Exception) -> bool:
        """Return True if a failure is to be logged. Its key is its code location, and its text if it is our error."""
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None else ""
        key = (place, error.message) if isinstance(error, EnginehouseError) else (place, type(error).__name__)
        if key in self._seen or len(self._seen) >= _MAX_TOLD:
            return False
        self._seen.add(key)
        return True


@frozen
class Authenticator:
    """Identifies callers. ``ask`` is the plugin's hook."""

    plugin: str
    ask: Callable[..., Identity | None]
    _told: _Told = field(factory=_Told, init=False, repr=False)

    def identify(self, credentials: Credentials) -> Identity | None:
        """Return the caller with the plugin's name as a prefix, or None if this plugin does not know it.

        Any thread; may block.

        Raises:
            PluginError: the plugin failed or its result is not a valid identity; the reason is logged once.
        """
        try:
            found = self.ask(credentials=credentials)
            if found is None:
                return None
            _check(found)
        except Exception as error:  # error boundary: a caller on which the plugin fails is refused
            self._log(error)
            raise PluginError(f"the authenticator {self.plugin!r} failed", self.plugin) from error
        name = f"{self.plugin}:{found.name}"
        return evolve(found, name=name, namespace=found.namespace or name)

    def _log(self, error: Exception) -> None:
        """Log an error once; errors of ours need no traceback."""
        if not self._told.is_new(error):
            return
        said, trace = (error.message, None) if isinstance(error, EnginehouseError) else (type(error).__name__, error)
        text = (
            "the authenticator %s failed; its caller is refused, as are others that it fails over, without a line: %s"
        )
        _log.error(text, self.plugin, said, exc_info=trace)


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
