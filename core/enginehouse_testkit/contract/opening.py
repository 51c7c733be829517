"""The fixture that backend authors provide: a backend, and a small model that the suites may open with it."""

from __future__ import annotations

from typing import Any, cast

import attrs
import pytest
from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource, Runner
from enginehouse.contract.engine import Engine
from enginehouse.contract.pooler import Pooler

__all__ = ["ModelUnderTest"]


@frozen(kw_only=True)
class ModelUnderTest:
    """Backend and model under test.

    Attributes:
        backend: the object that the plugin registers.
        source: a model that it opens; small, since it is opened several times.
        options: an instance of ``backend.options`` with a context of at least 64 tokens and at least four slots.
    """

    backend: Backend
    source: ModelSource
    options: Any

    def open(self, **changes: Any) -> Runner | Pooler | Engine:
        """Open the model, with options changed as in ``changes``."""
        options = attrs.evolve(self.options, **changes) if changes else self.options
        return self.backend.open(self.source, options, lambda _share, _what: None)

    def open_runner(self) -> Runner:
        """Open the model as a runner; skips the test of a pooling model."""
        opened = self.open()
        if isinstance(opened, Pooler):
            opened.close()
            pytest.skip("optional: the model is a pooling model, which PoolerContract tests")
        return cast(Runner, opened)

    def open_pooler(self) -> Pooler:
        """Open the model as a pooler; skips the test of another model."""
        opened = self.open()
        if not isinstance(opened, Pooler):
            cast(Runner, opened).close()
            pytest.skip("optional: the model is not a pooling model")
        return opened
