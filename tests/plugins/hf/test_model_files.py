"""Files that would run code, and damaged ones: refused with a reason, and nothing of them has run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.contract.types import EngineSettings
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Load
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.contract.model_folder import Payload

TinyModel = Callable[[str], Path]


def open_model(path: Path, **options: object) -> None:
    HfBackend().open(ModelSource(str(path), path), HfOptions(**options), lambda *_: None).close()


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.ckpt"])
def test_pickles_are_not_read_for_an_estimate(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    source = ModelSource(str(folder), folder)

    assert "pickles" in HfBackend().match(source).reason
    with pytest.raises(ModelLoadError, match=name):
        HfBackend().estimate(source, HfOptions())
    assert not (tmp_path / "ran").exists()


def test_pickles_beside_safetensors_are_passed_by(folder: Path, tmp_path: Path) -> None:
    """Not even when the safetensors are damaged does anything fall back on them."""
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    open_model(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(EnginehouseError):
        open_model(folder)
    assert not (tmp_path / "ran").exists()


def test_a_gguf_in_parts_is_refused(tmp_path: Path) -> None:
    """Transformers would read the first one, and draw the other weights at random."""
    (path := tmp_path / "tiny-00001-of-00003.gguf").write_bytes(b"GGUF")

    with pytest.raises(ModelLoadError, match="in several parts"):
        open_model(path)


def test_pickled_weights_are_read_for_whoever_trusts_them(folder: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    open_model(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    "data",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 2**60, 0, 2**60),
    ],
)
def test_damaged_gguf_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(EnginehouseError):
        HfBackend().estimate(ModelSource(str(path), path), HfOptions())
    with pytest.raises(EnginehouseError):
        open_model(path)


def _with_merge(spec: dict[str, Any]) -> None:
    spec["model"]["merges"][0] = ["<|im_end|>", spec["model"]["merges"][0][1]]


def _with_huge_id(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"][next(iter(spec["model"]["vocab"]))] = 2**32 - 1


@pytest.mark.parametrize("change", [_with_merge, _with_huge_id])
async def test_tokenizers_that_break_their_library_are_named_failures_of_a_worker(
    folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Found by fuzzing: the library panics over the one, and counts up to the other."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text(encoding="utf-8"))
    change(spec)
    path.write_text(json.dumps(spec), encoding="utf-8")
    load = Load(
        backend="hf",
        source_text=str(folder),
        source_path=str(folder),
        options={"slots": 1},
        options_path="models.m",
        engine=EngineSettings(slots=1),
        plugins=PluginsSettings(allow=()),
    )

    with pytest.raises(ModelLoadError, match=r"tokenizer|hf"):
        await WorkerEngine.open(load, isolation="process", python=None, on_progress=lambda *_: None)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "model-2.safetensors"])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)

    for work in (lambda: open_model(folder), lambda: HfBackend().match(ModelSource(str(folder), folder))):
        with pytest.raises(ModelLoadError, match="not a regular file"):
            work()
