"""Calls a plugin's ``authenticate`` hook, on threads of its own, and checks the identities that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import get_args

from attrs import define, evolve, field

from enginehouse.contract.errors import PluginFailed
from enginehouse.contract.identity import Credentials, Identity, Scope
from enginehouse.plugins.guard import Guard, PluginFailures
from enginehouse.plugins.threads import PluginThreads
from enginehouse.settings.profiles import PROFILES

_PLACE = "authenticate"


@define(eq=False)
class Authenticator:
    """Identifies callers.

    Attributes:
        plugin: name of the plugin.
        ask: the plugin's hook.
    """

    plugin: str
    ask: Callable[..., Identity | None]
    _guard: Guard = field(init=False)
    _threads: PluginThreads = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.use_failures(PluginFailures())

    def use_failures(self, failures: PluginFailures) -> None:
        """Count and log failures here from now on."""
        self._guard = Guard(self.plugin, "authenticator", self.plugin, failures)
        self._threads = PluginThreads(self._guard)

    def end_threads(self) -> None:
        """End the threads, which are started again when they are needed."""
        self._threads.end()

    async def find(self, credentials: Credentials, timeout_s: float) -> Identity | None:
        """Run :meth:`identify` in a thread of this plugin.

        Raises:
            PluginFailed: as :meth:`identify`; or it took longer than ``timeout_s``, or too many callers wait for it.
        """
        return await self._threads.run(_PLACE, lambda: self.identify(credentials), timeout_s)

    def identify(self, credentials: Credentials) -> Identity | None:
        """Return the caller with the plugin's name as a prefix, or None if this plugin does not know it.

        Any thread; may block.

        Raises:
            PluginFailed: the plugin failed or its result is not a valid identity.
        """
        with self._guard.calling(_PLACE, passes=(PluginFailed,)):
            found = self.ask(credentials=credentials)
        if found is None:
            return None
        if not isinstance(found, Identity):
            raise self._guard.mistake(_PLACE, f"gave {type(found).__name__}, an Identity or None was expected")
        for problem in _problems(found):
            raise self._guard.mistake(_PLACE, problem)
        name = f"{self.plugin}:{found.name}"
        return evolve(found, name=name, namespace=found.namespace or name)


def _problems(found: Identity) -> Iterator[str]:
    """Yield what is wrong with an identity, as ends of sentences."""
    if not (isinstance(found.name, str) and found.name and found.name.isprintable() and " " not in found.name):
        yield "gave an Identity whose name is not a word of printable characters"
    if not found.namespace.isprintable():
        yield "gave an Identity whose namespace has characters that cannot be printed"
    for limit in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        most = getattr(found, limit)
        if most is not None and most < 1:
            yield f"gave an Identity whose {limit} is {most}; it must be at least 1, or None for the server's own"
    if found.profile is not None and found.profile not in PROFILES:
        yield f"gave an Identity with the unknown profile {found.profile!r}"
    if unknown := sorted(set(found.scopes) - set(get_args(Scope))):
        yield f"gave an Identity with the unknown scopes {', '.join(map(str, unknown))}"
    if found.is_expired(datetime.now(UTC)):
        yield "gave an Identity that has expired; give None for a caller that may not enter"
