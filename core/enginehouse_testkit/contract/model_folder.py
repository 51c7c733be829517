"""Contract suite for backends that read model folders (``config.json``, a tokenizer, safetensors).

::

    class TestMyFolders(ModelFolderContract):
        libraries = ("my_library",)
        label = "my-library "
        own_code = {"code": "theirs.py"}

with the fixture ``model`` of :class:`enginehouse_testkit.backend_contract.BackendContract`: a small Llama in float32
that supports 512 tokens, with options of context 64.
"""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from attrs import evolve

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse_testkit.contract.opening import ModelUnderTest

__all__ = ["DAMAGED_SAFETENSORS", "ModelFolderContract", "Payload", "changed_folder"]

_Attempt = Callable[..., Runner]

_WITHOUT = """
import base64, pickle, sys
backend, source, options = pickle.loads(base64.b64decode(sys.argv[1]))
sys.modules[sys.argv[2]] = None
from enginehouse.contract.errors import MissingDependency
try:
    backend.open(source, options, lambda share, what: None)
except MissingDependency as error:
    print(backend.probe().available, error.message)
"""


def _safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


def _tensor(num_bytes: int = 0, **changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    return _safetensors(json.dumps({"a": tensor}).encode()) + bytes(num_bytes)


DAMAGED_SAFETENSORS = {
    "empty": b"",
    "huge_header": _safetensors(b"{}", 2**63),
    "large_header": _safetensors(b"{}", 99_000_000),
    "no_json": _safetensors(b"{nonsense"),
    "nested": _safetensors(b'{"a":' * 100_000),
    "list": _safetensors(b"[]"),
    "cut": _tensor()[:-5],
    "outside": _tensor(data_offsets=[0, 2**62]),
    "backwards": _tensor(data_offsets=[16, 0]),
    "huge_shape": _tensor(shape=[2**31, 2**31, 2**31]),
    "negative": _tensor(shape=[-4]),
    "unknown_type": _tensor(16, dtype="F99"),
}
"""Contents of files that are not safetensors files, by what is wrong with them."""


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self._path,))


def changed_folder(folder: Path, target: Path, **changes: object) -> Path:
    """Copy a model folder to ``target`` with other values in its configuration."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


class ModelFolderContract:
    """Tests what every backend owes to a model folder: estimate, defaults, and refusals of broken or hostile files.

    Attributes:
        libraries: packages without which a model cannot be opened; the error names the backend's extra.
        label: start of ``metadata["library"]`` of a model.
        own_code: values of a configuration that ask for the code in ``theirs.py``.
    """

    libraries: ClassVar[tuple[str, ...]]
    label: ClassVar[str]
    own_code: ClassVar[dict[str, Any]]

    @pytest.fixture
    def folder(self, model: ModelUnderTest, tmp_path: Path) -> Path:
        """A copy of the model that a test may change."""
        assert model.source.path is not None
        return changed_folder(model.source.path, tmp_path / "model")

    @pytest.fixture
    def open_model(self, model: ModelUnderTest) -> _Attempt:
        """A function that opens another folder, with changed options."""

        def attempt(path: Path, **changes: Any) -> Runner:
            options = evolve(model.options, **changes) if changes else model.options
            return cast(Runner, model.backend.open(ModelSource(str(path), path), options, lambda _share, _what: None))

        return attempt

    def test_open_names_the_extra_when_a_library_is_missing(self, model: ModelUnderTest) -> None:
        """In a process where it cannot be imported; the probe then says that the backend is not available."""
        sent = base64.b64encode(pickle.dumps((model.backend, model.source, model.options))).decode()
        for library in self.libraries:
            command = [sys.executable, "-c", _WITHOUT, sent, library]
            done = subprocess.run(command, capture_output=True, text=True, check=False)

            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("False ")
            assert f"pip install 'enginehouse[{model.backend.name}]'" in done.stdout

    def test_estimate_counts_weights_and_kv(self, model: ModelUnderTest) -> None:
        """Weights by the size of their file, KV by the configuration, both in the type in which they are kept."""
        path = model.source.path
        assert path is not None
        config = json.loads((path / "config.json").read_text())
        size = (path / "model.safetensors").stat().st_size
        kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
        whole = model.backend.estimate(model.source, evolve(model.options, context=100, slots=3))
        half = model.backend.estimate(model.source, evolve(model.options, dtype="bfloat16"))

        assert (whole.weights_bytes, whole.kv_bytes_per_token) == (size, kv_bytes)
        assert whole.total_bytes == size + 300 * kv_bytes
        assert (half.weights_bytes, half.kv_bytes_per_token) == (size // 2, kv_bytes // 2)

    def test_progress_ends_at_one(self, model: ModelUnderTest) -> None:
        """It begins at 0."""
        shares: list[float] = []
        opened = model.backend.open(model.source, model.options, lambda share, _: shares.append(share))
        cast(Runner, opened).close()

        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0.0, 1.0)

    def test_context_beyond_the_model_is_refused(self, folder: Path, open_model: _Attempt) -> None:
        """The error says what the model supports."""
        with pytest.raises(ModelLoadError, match=r"context = 513 is more than this model supports \(512\)"):
            open_model(folder, context=513)

    def test_a_model_recommends_what_its_generation_config_says(self, folder: Path, open_model: _Attempt) -> None:
        """Entries that are not sampling parameters are left out."""
        (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
        runner = open_model(folder)
        try:
            assert runner.info.generation_defaults == {"temperature": 0.6, "top_k": 20}
            assert str(runner.info.metadata["library"]).startswith(self.label)
        finally:
            runner.close()

    def test_broken_folders_are_load_errors(self, folder: Path, open_model: _Attempt, tmp_path: Path) -> None:
        """The library raises a different error for each; all are ModelLoadError."""
        bad_json = changed_folder(folder, tmp_path / "bad_json")
        (bad_json / "config.json").write_text("{")
        unknown = changed_folder(folder, tmp_path / "unknown", model_type="no_such_model")
        empty = tmp_path / "empty"
        empty.mkdir()
        for path in (bad_json, unknown, tmp_path / "missing", empty):
            with pytest.raises(ModelLoadError):
                open_model(path)

    @pytest.mark.parametrize("data", DAMAGED_SAFETENSORS.values(), ids=DAMAGED_SAFETENSORS)
    def test_damaged_safetensors_are_refused(self, folder: Path, open_model: _Attempt, data: bytes) -> None:
        """Nothing of the size that a header claims is allocated."""
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(EnginehouseError, match="model"):
            open_model(folder)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.ckpt"])
    def test_pickles_are_not_read(self, folder: Path, open_model: _Attempt, tmp_path: Path, name: str) -> None:
        """The error names the file."""
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
        with pytest.raises(ModelLoadError, match=rf"{name}.*pickles"):
            open_model(folder)
        assert not (tmp_path / "ran").exists()

    def test_code_of_a_folder_is_not_run(self, folder: Path, open_model: _Attempt, tmp_path: Path) -> None:
        """A configuration that asks for it is refused."""
        path = changed_folder(folder, tmp_path / "with_code", **self.own_code)
        (path / "theirs.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
        with pytest.raises(EnginehouseError):
            open_model(path)
        assert not (tmp_path / "ran").exists()
