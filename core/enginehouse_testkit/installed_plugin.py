"""Contract suites for an installed plugin: the module that ``enginehouse plugins check`` passes to pytest.

``ENGINEHOUSE_CHECKED`` in the environment is JSON: the ``plugin``, and for its backends a ``model``, its ``options``
and the ``tolerance`` of logits. Each suite of each kind of object that the plugin registers becomes a test class, such
as ``TestSampler``.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from typing import Any

import attrs
import click
import pytest

from enginehouse.contract.backend import Backend
from enginehouse.plugins import PluginRegistry, plain
from enginehouse.plugins.kinds import KINDS, Kind
from enginehouse.plugins.processors import ProcessorSampler
from enginehouse.serving.sources import find_source
from enginehouse.settings.config import PluginsSettings, structure_options
from enginehouse_testkit.backend_contract import ModelUnderTest
from enginehouse_testkit.pooler_contract import PoolerContract
from enginehouse_testkit.runner_contract import RunnerContract

__all__ = ["test_targets_of_commands_exist", "test_the_plugin_registers_something"]

_CHECKED: dict[str, Any] = json.loads(os.environ["ENGINEHOUSE_CHECKED"])
_REGISTRY = PluginRegistry.load(PluginsSettings(allow=(_CHECKED["plugin"],)))


def _model(backend: Backend) -> ModelUnderTest:
    """Return the model of the command line, with a short context and few slots unless the options differ."""
    known = {attribute.name for attribute in attrs.fields(backend.options)}
    small = {name: value for name, value in (("context", 128), ("slots", 4)) if name in known}
    options = structure_options(backend.options, {**small, **_CHECKED["options"]}, "options")
    source = find_source(_CHECKED["model"], PluginRegistry.load(PluginsSettings()))
    return ModelUnderTest(backend=backend, source=source, options=options)


_MORE: dict[str, dict[str, Any]] = {
    "backends": {
        "model": pytest.fixture(scope="class")(staticmethod(_model)),
        "max_logit_difference": _CHECKED["tolerance"],
    },
    "drafters": {"uses_second_model": True},
}
"""Additional attributes for the suites of a kind, besides its objects."""


def test_the_plugin_registers_something() -> None:
    """The plugin loads, and each of its hooks exists."""
    (record,) = [record for record in _REGISTRY.plugins if record.name == _CHECKED["plugin"]]

    assert record.error is None
    assert record.hooks


def test_targets_of_commands_exist() -> None:
    """Each is a click command."""
    for name, command in _REGISTRY.commands.items():
        module, _, attribute = command.target.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        if not isinstance(found, click.Command):
            what = f"the command {name!r} has the target {command.target}, which is not a click command"
            pytest.fail(what, pytrace=False)


def _test_classes(kind: Kind) -> Iterator[type[Any]]:
    """Yield a test class for each suite of a kind: the suite with a fixture over the plugin's objects."""
    for path in kind.suites:
        module, _, name = path.partition(":")
        suite = getattr(importlib.import_module(module), name)
        objects = {
            name: plain(candidate)  # without core's guard, whose errors quote no exception
            for name, candidate in getattr(_REGISTRY, kind.name).items()
            if not isinstance(plain(candidate), ProcessorSampler)  # tested as a logits processor
            and (suite not in (PoolerContract, RunnerContract) or candidate.opens == "model")
        }
        if objects:
            each = pytest.fixture(scope="class", params=list(objects.values()), ids=list(objects))
            fixture = each(staticmethod(lambda request: request.param))
            attributes = {kind.fixture: fixture, **_MORE.get(kind.name, {})}
            yield type(f"Test{name.removesuffix('Contract')}", (suite,), attributes)


for _kind in KINDS.values():
    for _test_class in _test_classes(_kind):
        globals()[_test_class.__name__] = _test_class
