"""Loading of plugins, one by one: validation of their objects, and records of what they bring and of their errors.

Rules of single kinds are in the table of kinds. Does not know the plugin manager; the loader calls it for each object
that a hook registers.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
from attrs import define, evolve, field, frozen

from enginehouse.contract.errors import ConfigError, PluginError
from enginehouse.contract.refusals import NAMES
from enginehouse.contract.rows import RequestField, fields_of
from enginehouse.plugins.kinds import KINDS, Kind

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
        error: why it, or a part of it, does not work; None if all of it works.
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
        except BaseException as error:  # noqa: BLE001 - guard of loading: any exception of a plugin is its record's error
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


@define(eq=False)
class Registration:
    """The accepted objects.

    Attributes:
        objects: kind name to object by name.
        owners: plugin of each object, by kind and name.
        request_fields: field of the request body by name.
    """

    objects: dict[str, dict[str, Any]] = field(factory=lambda: {name: {} for name in KINDS})
    owners: dict[tuple[str, str], str] = field(factory=dict)
    request_fields: dict[str, RequestField] = field(factory=dict)

    def register(self, kind: Kind, plugin: str, candidate: Any) -> None:
        """Validate and store an object, and the request fields that it declares.

        Raises:
            PluginError: the object is incomplete or of an unknown version, or its name or a request field is in use.
        """
        _check_protocol(kind, candidate)
        stored = kind.name if kind.also is None else kind.also[0]
        self._check_name(kind, stored, candidate.name)
        if kind.check is not None:
            kind.check(candidate, self.objects[stored])
        if kind.also is not None:
            other, make = kind.also
            self.register(KINDS[other], plugin, make(candidate))
        elif "request_fields" in kind.protocol.__annotations__:
            self._add_request_fields(plugin, candidate, is_sampled=kind.name == "samplers")
        self.add(kind, plugin, candidate.name, candidate)

    def add(self, kind: Kind, plugin: str, name: str, candidate: Any) -> None:
        """Store an object without validation."""
        self.objects[kind.name][name] = candidate
        self.owners[kind.name, name] = plugin

    def register_function(self, kind: Kind, plugin: str, name: str, function: Callable[..., Any]) -> None:
        """Validate and store a function that is registered with a name.

        Raises:
            PluginError: the name is in use, or it is not a function.
        """
        _check_text(kind, name)
        self._check_name(kind, kind.name, name)
        if not callable(function):
            raise PluginError(f"the {kind.noun} {name!r} must be a function, not {type(function).__name__}", plugin)
        self.add(kind, plugin, name, function)

    def _check_name(self, kind: Kind, stored: str, name: str) -> None:
        """Raise PluginError if core or another object has the name.

        Args:
            stored: name of the kind whose objects share their names with this kind's.
        """
        if name in KINDS[stored].core_names:
            raise PluginError(f"the {kind.noun} name {name!r} is core's own")
        if name in self.objects[stored]:
            owner = self.owners[stored, name]
            raise PluginError(f"the {kind.noun} name {name!r} is taken by the plugin {owner!r}")

    def _add_request_fields(self, plugin: str, candidate: Any, *, is_sampled: bool) -> None:
        try:
            declared = fields_of(candidate.request_fields, candidate.name, plugin, is_sampled=is_sampled)
        except ValueError as error:
            raise PluginError(f"{candidate.name!r}: {error}", plugin) from error
        if declared and (other := next((f for f in self.request_fields.values() if f.owner == candidate.name), None)):
            owner = f"the plugin {other.plugin!r} has request fields under the name {candidate.name!r}"
            raise PluginError(f"{owner} already; use another name", plugin)
        for declaration in declared:
            if declaration.name in NAMES:
                raise PluginError(f"the request field {declaration.name!r} is core's own", plugin)
            if other := self.request_fields.get(declaration.name):
                raise PluginError(f"the request field {declaration.name!r} is taken by {other.plugin!r}", plugin)
        self.request_fields.update({declaration.name: declaration for declaration in declared})


def missing_members(protocol: Any, found: Any) -> list[str]:
    """Return the public attributes and methods of a protocol that an object lacks."""
    wanted = [*protocol.__annotations__, *(key for key in vars(protocol) if not key.startswith("_"))]
    return [key for key in wanted if not hasattr(found, key)]


def _check_protocol(kind: Kind, candidate: Any) -> None:
    """Raise PluginError unless ``candidate`` is an object with all members of its kind's interface."""
    if isinstance(candidate, type):
        made = candidate.__name__
        raise PluginError(f"the {kind.noun} must be an object, not the class {made}: call register({made}())")
    protocol, name = kind.protocol, getattr(candidate, "name", candidate)
    if missing := missing_members(protocol, candidate):
        raise PluginError(f"the {kind.noun} {name!r} lacks {', '.join(missing)}")
    _check_text(kind, name)
    for key in (key for key in vars(protocol) if not key.startswith("_")):
        _check_method(f"{key} of the {kind.noun} {name!r}", getattr(protocol, key), getattr(candidate, key))
    _check_version(kind, name, candidate.api_version)
    if "options" in protocol.__annotations__ and not attrs.has(candidate.options):
        raise PluginError(f"the options of the {kind.noun} {name!r} must be an attrs class")


def _check_text(kind: Kind, name: Any) -> None:
    if not (isinstance(name, str) and name.strip() and name.isprintable()):
        raise PluginError(f"the name of the {kind.noun} must be printable text, not {name!r}")


def _check_method(what: str, promised: Any, found: Any) -> None:
    if not inspect.isfunction(promised):
        return  # a property, or an attribute of a class with slots
    if not callable(found):
        raise PluginError(f"{what} must be a method, not {type(found).__name__}")
    if inspect.iscoroutinefunction(found) and not inspect.iscoroutinefunction(promised):
        raise PluginError(f"{what} must be defined with def, not async def")


def _check_version(kind: Kind, name: str, version: Any) -> None:
    """Raise PluginError unless the version is the present or the previous one."""
    if type(version) is not int:
        raise PluginError(f"api_version of the {kind.noun} {name!r} must be an int, not {version!r}")
    oldest = max(1, kind.api_version - 1)
    if not oldest <= version <= kind.api_version:
        takes = str(oldest) if oldest == kind.api_version else f"{oldest} or {kind.api_version}"
        raise PluginError(f"the {kind.noun} {name!r} has api_version {version}; this Enginehouse takes {takes}")
