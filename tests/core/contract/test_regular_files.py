"""Files that are none: never waited for, and read to a size, wherever those of models, caches and keys are opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from enginehouse.api.http.keys import read_key_file
from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.contract.regular_files import check_regular, open_regular, read_regular, read_regular_text
from enginehouse.engine.disk import StateFolder
from enginehouse.engine.disk.state_folder import digest
from enginehouse.pipeline.prompt.chat_prompt import ModelTemplates
from enginehouse.settings.config import ModelSettings
from enginehouse_backendkit.model_folder import ModelFolder, recommended_parameters

pytestmark = [pytest.mark.timeout(20), pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files here")]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": make_pipe,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}
IRREGULAR = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of short name: the address of a socket is bounded."""
    monkeypatch.chdir(tmp_path)
    return Path()


@IRREGULAR
def test_only_regular_files_are_opened(make: Callable[[Path], None], place: Path) -> None:
    make(place / "x")
    for work in (check_regular, open_regular, lambda path: read_regular(path, 5)):
        with pytest.raises(OSError, match="not a regular file"):
            work(place / "x")


def test_files_are_read_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")

    assert read_regular(path, 5) == b"12345" and read_regular_text(path, 5) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(path, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y", 4)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_regular(link, 5) == b"12345"


@IRREGULAR
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "x.txt"])
def test_a_model_folder_holds_files(make: Callable[[Path], None], name: str, place: Path) -> None:
    for other in {"config.json", "model.safetensors"} - {name}:
        (place / other).write_text('{"num_hidden_layers": 1}')
    make(place / name)

    try:
        assert ModelFolder.find(ModelSource(".", place)) is None or make is KINDS["folder"]
    except ModelLoadError as error:
        assert name in error.message


@IRREGULAR
def test_what_is_optional_in_a_model_folder_is_left_out(make: Callable[[Path], None], place: Path) -> None:
    make(place / "generation_config.json")
    assert recommended_parameters(place) == {}


@IRREGULAR
def test_saved_sequences_are_files(make: Callable[[Path], None], place: Path) -> None:
    for name in ("a.state", "b.tmp"):
        make(place / name)

    folder = StateFolder(place, digest(b"m"), 10**6, can_cut=True)

    assert len(folder) == 0
    token_ids = np.arange(100, dtype=np.int32)
    assert folder.write(token_ids, "", memoryview(b"state"))
    (path,) = [path for path in place.glob("*.state") if path.is_file()]
    found = folder.find(token_ids, "")
    assert found is not None
    path.unlink()
    make(path)
    assert folder.read(found[0]) is None, "it was exchanged meanwhile"
    folder.close()


@IRREGULAR
def test_a_temporary_file_is_a_new_one(make: Callable[[Path], None], place: Path) -> None:
    folder = StateFolder(place, digest(b"m"), 10**6, can_cut=True)
    token_ids = np.arange(100, dtype=np.int32)
    assert folder.write(token_ids, "", memoryview(b"state"))
    (path,) = place.glob("*.state")
    make(path.with_suffix(".tmp"))

    assert folder.write(token_ids, "", memoryview(b"other")) == (make is not KINDS["folder"])
    folder.close()


@IRREGULAR
def test_keys_and_templates_are_files(make: Callable[[Path], None], place: Path) -> None:
    make(place / "x")

    with pytest.raises(ConfigError, match="not a regular file"):
        read_key_file(place / "x")
    with pytest.raises(ConfigError, match="not a regular file"):
        ModelTemplates({"m": ModelSettings(source="m", chat_template=str(place / "x"))})
