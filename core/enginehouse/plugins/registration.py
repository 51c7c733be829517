"""Validation of plugin objects, one by one: complete, of a known version, with a free name.

Rules of single kinds are in the table of kinds. Does not know the plugin manager; the loader calls it for each object
that a hook registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
from attrs import define, field

from enginehouse.contract.errors import PluginError
from enginehouse.contract.refusals import NAMES
from enginehouse.contract.rows import RequestField, fields_of
from enginehouse.plugins.kinds import KINDS, Kind

__all__ = ["Registration", "missing_members"]


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
