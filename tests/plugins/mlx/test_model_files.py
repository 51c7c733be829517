"""Files that would run code, and damaged ones: refused with a reason, and nothing of them has run."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse_mlx.backend import MlxBackend, MlxOptions

TinyModel = Callable[[str], Path]


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self._path,))


def open_model(path: Path) -> None:
    MlxBackend().open(ModelSource(str(path), path), MlxOptions(), lambda *_: None).close()


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def test_pickles_are_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*pickles"):
        open_model(folder)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "theirs.py"}))
    (folder / "theirs.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(ModelLoadError, match=r"theirs\.py"):
        open_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 99_000_000) + b"{}",
        struct.pack("<Q", 9) + b"{nonsense",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 68) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4611686018427387904]}}'[:68],
    ],
    ids=["empty", "huge_header", "large_header", "no_json", "list", "cut"],
)
def test_damaged_safetensors_are_refused(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(EnginehouseError, match="model"):
        open_model(folder)
