"""Guarded objects keep the interfaces of the objects in them, on every Python."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from enginehouse.contract.adapters import AdapterKeeper
from enginehouse.contract.backend import CutPlanner, DeviceSampler, Runner, StateKeeper
from enginehouse.contract.checkpoints import CheckpointKeeper
from enginehouse.contract.drafter import Drafter, HeadDrafter, HeadKeeper, LayerDrafter
from enginehouse.contract.engine import Engine, PoolingEngine, ReplicatedEngine
from enginehouse.contract.exit_policy import LayerAccess
from enginehouse.contract.inspection import Inspectable
from enginehouse.contract.router import ChecksModels, ComparesTexts, Router
from enginehouse.plugins import Guard, guarded

OPTIONAL: dict[Any, tuple[Any, ...]] = {
    Drafter: (HeadDrafter, LayerDrafter),
    Engine: (Inspectable, PoolingEngine, ReplicatedEngine),
    Router: (ChecksModels, ComparesTexts),
    Runner: (AdapterKeeper, CheckpointKeeper, CutPlanner, DeviceSampler, HeadKeeper, LayerAccess, StateKeeper),
}
CASES = [(interface, optional) for interface, some in OPTIONAL.items() for optional in some]
CASES += [(interface, interface) for interface in OPTIONAL if interface is Runner]


def _members(interface: Any) -> set[str]:
    """Names of the methods, properties and annotated attributes of an interface and of those it extends."""
    names: set[str] = set()
    for part in interface.__mro__:
        if part not in (object, Protocol) and getattr(part, "_is_protocol", False):
            names |= set(part.__annotations__) | {name for name in vars(part) if not name.startswith("_")}
    return {name for name in names if not name.startswith("_")}


def _statically_has(candidate: object, name: str) -> bool:
    """``isinstance`` finds members so from Python 3.12 on: without ``__getattr__`` and without reading properties."""
    try:
        inspect.getattr_static(candidate, name)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize(("interface", "optional"), CASES)
def test_a_guarded_object_has_the_optional_interfaces_of_its_object(interface: Any, optional: Any) -> None:
    guard = Guard("p", "kind", "name", is_own=True)
    members = _members(interface) | _members(optional)
    full = guarded(SimpleNamespace(**{name: lambda *_: None for name in members}), interface, guard)

    assert isinstance(full, optional)
    assert [name for name in sorted(members) if not _statically_has(full, name)] == []


@pytest.mark.parametrize(("interface", "optional"), [(one, other) for one, other in CASES if one is not other])
def test_a_guarded_object_has_no_other_interface(interface: Any, optional: Any) -> None:
    guard = Guard("p", "kind", "name", is_own=True)
    bare = guarded(SimpleNamespace(**{name: lambda *_: None for name in _members(interface)}), interface, guard)

    assert not isinstance(bare, optional)
    added = _members(optional) - _members(interface)
    assert not any(_statically_has(bare, name) for name in added)
