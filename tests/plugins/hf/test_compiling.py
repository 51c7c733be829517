"""Kernels on a GPU are compiled while the model is loaded, not while requests wait."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse_hf.backend import HfBackend, HfOptions

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

_COUNTS = {"num_tokens", "num_pairs"}
"""Parameters of kernels that differ from step to step; in the search of draws also ``num_rows``."""

_KERNELS = Path(importlib.util.find_spec("enginehouse_hf").origin or "").parent / "cuda"  # type: ignore[union-attr]


def _launched(tree: ast.Module) -> set[str]:
    """Names of the kernels that are launched, as ``kernel[grid](...)``."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)}


def _not_specialised(kernel: ast.FunctionDef) -> set[str]:
    """Parameters for whose values Triton does not compile the kernel again."""
    return {
        name
        for decorator in kernel.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == "do_not_specialize"
        for name in ast.literal_eval(keyword.value)
    }


def test_no_kernel_is_compiled_again_for_a_number_of_tokens() -> None:
    """Triton compiles a kernel for each integer that is 1, a multiple of 16, or neither, unless it is told not to."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(_KERNELS.glob("*.py"))}
    launched, checked = set[str]().union(*map(_launched, trees.values())), 0
    for file, tree in trees.items():
        counts = _COUNTS | ({"num_rows"} if file.startswith("search") else set())
        for kernel in tree.body:
            if not isinstance(kernel, ast.FunctionDef) or kernel.name not in launched:
                continue
            given = {argument.arg for argument in kernel.args.args if argument.annotation is None}

            assert given & counts <= _not_specialised(kernel), f"{file}: {kernel.name}"
            checked += bool(given & counts)

    assert checked >= 10


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are compiled from now on, in a process that has none."""
    from triton import JITFunction, knobs

    import enginehouse_hf.cuda.opening  # noqa: F401 - imports all kernels

    for path in _KERNELS.glob("*.py"):
        module = importlib.import_module(f"enginehouse_hf.cuda.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: names.append(told["fn"].name))
    yield names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"quantize": "fp8"}, {"quantize": "int4"}, {"type_k": "fp8", "type_v": "fp8"}])
def test_no_step_waits_for_a_compiler(
    tiny_model: Callable[[str], Path], compiled: list[str], options: dict[str, Any]
) -> None:
    """Prompts of many lengths, with the logits of one token and of all, alone and beside sequences that decode."""
    path = tiny_model("llama")
    settings = HfOptions(device="cuda:0", dtype="bfloat16", slots=8, context=512, cache_tokens=8192, **options)
    runner = HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)
    assert isinstance(runner, Runner) and compiled
    compiled.clear()
    others = [runner.open_sequence() for _ in range(7)]
    for number, other in enumerate(others):
        runner.forward([Span(other, 0, np.arange(1 + 5 * number, dtype=np.int32), "none")])
    for size in (1, 3, 7, 9, 16, 23, 32, 33, 50, 64, 65, 66, 100, 128, 150, 256, 257, 300):
        for num_others in (0, 1, 3, 7):
            beside = [Span(other, runner.length(other), np.array([5], np.int32)) for other in others[:num_others]]
            for outputs in ("last", "all") if size < 200 else ("last",):
                sequence = runner.open_sequence()
                runner.forward([Span(sequence, 0, np.arange(size, dtype=np.int32) % 90, outputs), *beside]).host()
                runner.free_sequence(sequence)
                beside = []
        assert not compiled, size
    runner.close()
