"""Load results of installed plugins, and the error boundary that records their exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, PluginError

__all__ = ["PluginRecord", "PluginRecords"]


@frozen(kw_only=True)
class PluginRecord:
    """Load result of one installed plugin.

    Attributes:
        name: its entry point, or the name under which another plugin added it.
        distribution: the installed package that contains it.
        version: that package's version.
        hooks: names of the hooks that it implements, sorted; empty if it was not imported.
        error: why it, or a part of it, does not work; None if there is no error.
        skipped: the settings exclude it from being imported; ``error`` is None then.
    """

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    error: str | None = None
    skipped: bool = False

    @property
    def problem(self) -> str | None:
        """The error as one line, ``name (distribution): reason``."""
        return f"{self.name} ({self.distribution}): {self.error}" if self.error else None


@define(eq=False)
class PluginRecords:
    """The records while plugins load: the first plugin with a name by that name, duplicates after it."""

    by_name: dict[str, PluginRecord] = field(factory=dict)

    def add_duplicate(self, record: PluginRecord, error: str) -> None:
        """Record a plugin whose name is already in use."""
        self.by_name[f"{record.name} {record.distribution}"] = evolve(record, error=error)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Record exceptions as errors of the plugin ``name``, so that other plugins are not affected.

        Catches broadly, including SystemExit during import. A ConfigError is propagated, because the user must fix it.
        """
        try:
            yield
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - error boundary of plugin code
            reason = error.message if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            record = self.by_name[name]
            known = f"{record.error}; " if record.error else ""
            self.by_name[name] = evolve(record, error=known + " ".join(reason.split()))
