"""What became of each installed plugin, and the border at which its exceptions become its error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, PluginError

__all__ = ["PluginRecord", "PluginRecords"]


@frozen(kw_only=True)
class PluginRecord:
    """What became of one installed plugin.

    Attributes:
        name: its entry point, or the name under which another plugin added it.
        distribution: the installed package that brings it.
        version: that package's version.
        hooks: names of the hooks that it implements, sorted; empty when it was not imported.
        error: why it, or a part of it, does not work; None when all is well.
        skipped: the settings say that it must not be imported; ``error`` is None then.
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
    """The records while plugins load: the plugin that owns a name by that name, further claimants after it."""

    by_name: dict[str, PluginRecord] = field(factory=dict)

    def add_duplicate(self, record: PluginRecord, error: str) -> None:
        """Record a plugin whose name is taken."""
        self.by_name[f"{record.name} {record.distribution}"] = evolve(record, error=error)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Turn an exception into an error of the plugin ``name``, so that the others go on; may be broad.

        A ConfigError is the user's to mend and goes on. A plugin that exits while it is imported is broken.
        """
        try:
            yield
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the border to code that is not ours
            reason = error.message if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            record = self.by_name[name]
            known = f"{record.error}; " if record.error else ""
            self.by_name[name] = evolve(record, error=known + " ".join(reason.split()))
