"""Validation of plugin objects, one by one: complete, of a known version, with a free name.

Rules of single kinds are in the table of kinds. Does not know the plugin manager; the loader calls it for each object
that a hook registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs import define, field

from enginehouse.contract.errors import PluginError
from enginehouse.contract.refusals import NAMES
from enginehouse.contract.rows import RequestField, fields_of
from enginehouse.plugins.kinds import KINDS, Kind

__all__ = ["Registration"]


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
        taken = self.objects[kind.name] if kind.also is None else self.objects[kind.also[0]]
        if candidate.name in taken:
            raise PluginError(f"the {kind.noun} name {candidate.name!r} is taken", plugin)
        if kind.check is not None:
            kind.check(candidate, taken)
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
        if name in self.objects[kind.name]:
            raise PluginError(f"the {kind.noun} {name!r} is taken", plugin)
        if not callable(function):
            raise PluginError(f"the {kind.noun} {name!r} must be a function", plugin)
        self.add(kind, plugin, name, function)

    def _add_request_fields(self, plugin: str, candidate: Any, *, is_sampled: bool) -> None:
        declared = fields_of(candidate.request_fields, candidate.name, plugin, is_sampled=is_sampled)
        for declaration in declared:
            if declaration.name in NAMES:
                raise PluginError(f"the request field {declaration.name!r} is core's own", plugin)
            if other := self.request_fields.get(declaration.name):
                raise PluginError(f"the request field {declaration.name!r} is taken by {other.plugin!r}", plugin)
        self.request_fields.update({declaration.name: declaration for declaration in declared})


def _check_protocol(kind: Kind, candidate: Any) -> None:
    """Raise PluginError if ``candidate`` lacks a member of its kind's interface or has an unknown version."""
    protocol, name = kind.protocol, getattr(candidate, "name", candidate)
    wanted = [*protocol.__annotations__, *(key for key in vars(protocol) if not key.startswith("_"))]
    missing = [key for key in wanted if not hasattr(candidate, key)]
    if missing:
        raise PluginError(f"the {kind.noun} {name!r} lacks {', '.join(missing)}")
    oldest = max(1, kind.api_version - 1)
    if not oldest <= candidate.api_version <= kind.api_version:
        raise PluginError(
            f"the {kind.noun} {name!r} has api_version {candidate.api_version!r}; "
            f"this Enginehouse takes {oldest} to {kind.api_version}"
        )
    if "options" in protocol.__annotations__ and not attrs.has(candidate.options):
        raise PluginError(f"the options of the {kind.noun} {name!r} must be an attrs class")
