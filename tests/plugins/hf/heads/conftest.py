"""Tiny models with draft heads, and how to open them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from enginehouse.contract.backend import ModelSource

if find_spec("torch") and find_spec("transformers"):
    from .models import write_eagle3, write_model


@pytest.fixture(scope="session")
def headed_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from a kind of model, and settings of ``write_model``, to a folder with it."""
    folders: dict[Any, Path] = {}

    def make(kind: str, **settings: Any) -> Path:
        key = (kind, *sorted(settings.items()))
        if key not in folders:
            folders[key] = write_model(kind, tiny_model("llama"), tmp_path_factory.mktemp(kind) / "model", **settings)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from settings of ``write_eagle3`` to a folder with a head."""
    folders: dict[str, Path] = {}

    def make(**settings: Any) -> Path:
        key = repr(sorted(settings.items()))
        if key not in folders:
            folders[key] = write_eagle3(tmp_path_factory.mktemp("eagle3") / "head", **settings)
        return folders[key]

    return make


def _open(folder: Path, settings: dict[str, Any]) -> Any:
    from enginehouse_hf.backend import HfBackend, HfOptions

    options = HfOptions(**{"dtype": "float32", "context": 128, "slots": 4} | settings)
    return HfBackend().open(ModelSource(str(folder), folder), options, lambda _share, _what: None)


@pytest.fixture
def open_model(way: dict[str, Any]) -> Callable[..., Any]:
    """A function from a folder and settings to a runner in float32, in each way in which the plugin runs a model."""
    return lambda folder, **settings: _open(folder, way | settings)


@pytest.fixture
def open_on_cpu() -> Callable[..., Any]:
    """The same, on the CPU only."""
    return lambda folder, **settings: _open(folder, {"device": "cpu"} | settings)
