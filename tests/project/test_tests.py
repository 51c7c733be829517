"""Tests stand alone: helpers have modules of their own, and tests use what users of the code may use."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .repository import ROOT, syntax_of

MODULES = sorted((ROOT / "tests").rglob("*.py"))

PRIVATE = {
    "tests/bench/cuda.py": "changes weights of a model that has no other use",
    "tests/bench/cuda_heads.py": "gives a runner a head that is in no file",
    "tests/core/api/test_listeners.py": "loads a plugin that is not installed",
    "tests/core/engine/test_speculation.py": "compares what a runner holds with the sequences of the scheduler",
    "tests/core/recovery/test_culprits.py": "constants",
    "tests/core/recovery/test_model_work.py": "an engine that pushes events by itself; constants",
    "tests/core/recovery/test_quarantine.py": "constants",
    "tests/core/recovery/test_recovery.py": "looks into recovery while it goes on",
    "tests/core/plugins/flaky.py": "ends its process with os._exit",
    "tests/core/serving/models/test_loading.py": "downloads that nobody asks for over HTTP",
    "tests/plugins/compress/test_preparer.py": "unloads the scorer of a pipeline",
    "tests/plugins/hf/test_cuda.py": "takes a kernel away",
    "tests/plugins/hf/test_fast_tokenizer.py": "compares two tokenizers of one object",
}
"""Modules that use private names of other objects, and why; each needs a reason."""


def imported_modules_and_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)


def test_test_modules_do_not_import_each_other() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES
        for name in imported_modules_and_names(syntax_of(path))
        if any(part.startswith("test_") for part in name.split("."))
    ]

    assert not found, "helpers belong in harness.py of their folder, or in the test kit"


OWN = ("self", "cls", "super()")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ("_asdict", "_replace")  # of namedtuples


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with one underscore that are taken from another object or module; ``self``, ``cls`` and ``super()`` may."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in OWN:
            yield ast.unparse(node)


def test_tests_use_no_private_names_of_other_objects() -> None:
    found = {str(path.relative_to(ROOT)): list(private_names(syntax_of(path))) for path in MODULES}
    users = {path for path, names in found.items() if names}

    assert users - PRIVATE.keys() == set(), "use what users of the object may use"
    assert PRIVATE.keys() - users == set(), "these need no exception any more"


def test_no_object_is_made_without_its_constructor() -> None:
    for path in MODULES:
        if path.name != "error_codes.py":  # reads the classes of errors, which all need arguments
            attributes = [node.attr for node in ast.walk(syntax_of(path)) if isinstance(node, ast.Attribute)]
            assert "__new__" not in attributes, path
