"""Load results of installed plugins, and the error boundary that records their exceptions."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, PluginError

__all__ = ["PluginRecord", "PluginRecords"]

_SLOW_S = 1.0
_NOT_OF_PLUGINS = ("enginehouse", "pluggy", "importlib", "contextlib")


@frozen(kw_only=True)
class PluginRecord:
    """Load result of one installed plugin.

    Attributes:
        name: its entry point, or the name under which another plugin added it.
        distribution: the installed package that contains it.
        version: that package's version.
        package: the import package of its module.
        hooks: names of the hooks that it implements, sorted; empty if it was not imported.
        brings: its objects that are in use, as ``sampler epsilon_cutoff``; ``authenticator`` and ``listener`` for its
            hooks that are called while the server runs.
        load_s: seconds that its import and its register hooks took.
        error: why it, or a part of it, does not work; None if there is no error.
        traceback: the traceback of the last exception of its code; None if there was none.
        skipped: the setting that excludes it from being imported, as a clause; None if it was imported.
        notes: further problems that do not prevent its use.
    """

    name: str
    distribution: str
    version: str
    package: str = ""
    hooks: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()
    load_s: float = field(default=0.0, eq=False)
    error: str | None = None
    traceback: str | None = field(default=None, repr=False)
    skipped: str | None = None
    notes: tuple[str, ...] = field(default=(), eq=False)

    @property
    def problem(self) -> str | None:
        """The error as one line, ``name (distribution): reason``."""
        return f"{self.name} ({self.distribution}): {self.error}" if self.error else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes, and the time if it is long, each as one line."""
        slow = (f"import and register hooks took {self.load_s:.1f} s",) if self.load_s > _SLOW_S else ()
        return tuple(f"{self.name} ({self.distribution}): {note}" for note in (*self.notes, *slow))


@define(eq=False)
class PluginRecords:
    """The records while plugins load: the first plugin with a name by that name, duplicates after it.

    Attributes:
        by_name: the records.
        wrong_settings: errors in the options of plugins.
    """

    by_name: dict[str, PluginRecord] = field(factory=dict)
    wrong_settings: list[ConfigError] = field(factory=list)

    def add_duplicate(self, record: PluginRecord, error: str) -> None:
        """Record a plugin whose name is already in use."""
        self.by_name[f"{record.name} {record.distribution}"] = evolve(record, error=error)

    def add_note(self, name: str, note: str) -> None:
        """Record a problem that does not prevent the use of a plugin."""
        record = self.by_name[name]
        self.by_name[name] = evolve(record, notes=(*record.notes, note))

    def add_time(self, name: str, seconds: float) -> None:
        """Count time that a plugin took to load."""
        record = self.by_name[name]
        self.by_name[name] = evolve(record, load_s=record.load_s + seconds)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Record exceptions as errors of the plugin ``name``, so that other plugins are not affected.

        Catches everything but Ctrl-C, SystemExit included.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - error boundary of plugin code
            if isinstance(error, ConfigError):
                self.wrong_settings.append(error)
            record = self.by_name[name]
            known = f"{record.error}; " if record.error else ""
            trace = record.traceback
            if not isinstance(error, ConfigError | PluginError):
                trace = "".join(traceback.format_exception(error))
            self.by_name[name] = evolve(record, error=known + _reason(error, record.package), traceback=trace)


def _reason(error: BaseException, package: str) -> str:
    """Return an exception as one line; one of the plugin's code with its location in the plugin."""
    if isinstance(error, ConfigError | PluginError):
        return " ".join(error.message.split())
    place = _place(error.__traceback__, package)
    return " ".join(f"{type(error).__name__}: {error}".split()) + (f" ({place})" if place else "")


def _place(trace: TracebackType | None, package: str) -> str:
    """Return ``folder/file.py:12, in function`` of the last frame in the plugin's package, or in any other but ours."""
    found, is_own = "", False
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        top = module.partition(".")[0]
        if top == package or (not is_own and top not in _NOT_OF_PLUGINS and not top.startswith("_frozen")):
            is_own = top == package
            code = trace.tb_frame.f_code
            path = Path(code.co_filename)
            depth = module.count(".") + 1 + (path.stem == "__init__")
            function = "" if code.co_name == "<module>" else f", in {code.co_name}"
            found = f"{'/'.join(path.parts[-depth:])}:{trace.tb_lineno}{function}"
        trace = trace.tb_next
    return found
