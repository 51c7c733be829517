"""The cache of downloads: what an id means in it, and files in it that are none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from enginehouse.cli.serve import choose_models
from enginehouse.contract.errors import DownloadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse_hub.cache import ModelCache, cached_snapshot, is_complete
from enginehouse_hub.client import HubClient
from enginehouse_hub.hub import HuggingFaceHub
from enginehouse_hub.listing import HubFile
from enginehouse_hub.reference import HubReference
from enginehouse_hub.transfer import Transfer

pytestmark = pytest.mark.timeout(60)

HUB = HuggingFaceHub()


def gguf(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


def safetensors(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for model, commit in (("owner--plain", "c1"), ("owner--packed", "c2")):
        folder = tmp_path / "hub" / f"models--{model}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
    safetensors(tmp_path / "hub/models--owner--plain/snapshots/c1")
    safetensors(tmp_path / "hub/models--owner--plain/snapshots/old")
    gguf(tmp_path / "hub/models--owner--packed/snapshots/c2", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    return tmp_path / "hub"


def test_hub_id_means_the_downloaded_model(kept: Path) -> None:
    snapshots = kept / "models--owner--plain/snapshots"

    assert HUB.find("owner/plain") == snapshots / "c1"
    assert HUB.find("owner/plain:old") == snapshots / "old"
    packed = kept / "models--owner--packed/snapshots/c2"
    assert HUB.find("owner/packed:Q4_K_M") == packed / "m-Q4_K_M.gguf"
    assert HUB.find("owner/absent") is None
    assert HUB.find("owner/absent:Q4_K_M") is None


@pytest.mark.parametrize("text", ["../plain", "owner/../x", "owner/plain/..", "a/b/c"])
def test_hub_id_leads_nowhere_else(kept: Path, text: str) -> None:
    assert cached_snapshot(text) is None
    assert cached_snapshot("owner/plain", "../../models--owner--packed/snapshots/c2") is None


def test_folder_of_downloads_is_the_librarys() -> None:
    code = "from enginehouse_hub.cache import ModelCache; print(ModelCache.of('a/b').folder)"

    def folder(**env: str) -> Path:
        names = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        return Path(subprocess.check_output([sys.executable, "-c", code], env={**clean, **env}, text=True).strip())

    assert folder(HF_HUB_CACHE="/a") == Path("/a/models--a--b")
    assert folder(HF_HOME="/b") == Path("/b/hub/models--a--b")
    assert folder(XDG_CACHE_HOME="/c") == Path("/c/huggingface/hub/models--a--b")


def test_served_name_is_the_id(kept: Path) -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("hub",)), builtin=["fake"])

    for name in ("owner/packed:Q4_K_M", "owner/plain"):
        assert list(choose_models([name], "fake", {}, registry)) == [name]


# -- files that are none ---------------------------------------------------------------------------


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
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
def test_the_cache_of_downloads_holds_files(make: Callable[[Path], None], place: Path) -> None:
    cache = ModelCache(place / "models--a--b")
    for path in (cache.incomplete("d" * 40), cache.folder / "refs" / "main"):
        path.parent.mkdir(parents=True)
        with_short_name = Path("x")
        make(with_short_name)
        with_short_name.rename(path)
    client = HubClient("http://127.0.0.1:9")
    transfer = Transfer(client, HubReference(model_id="a/b"), "c" * 40, cache, lambda count: None, print)

    assert cache.commit_of("main") is None
    with pytest.raises(DownloadError, match="not a regular file"):
        transfer.fetch(HubFile("x", 5, "d" * 40, "git"))


@IRREGULAR
def test_an_index_is_a_file(make: Callable[[Path], None], place: Path) -> None:
    (place / "config.json").write_text("{}")
    make(place / "model.safetensors.index.json")

    assert not is_complete(place, None)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "\xff"])
def test_an_index_that_is_none_is_no_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")

    assert not is_complete(tmp_path, None)


def test_two_downloads_of_a_model_may_end_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The links and the recorded commit of the other one are kept, and the blob stays where other commits find it."""
    cache, link, replace = ModelCache(tmp_path), Path.symlink_to, os.replace
    cache.blob("digest").parent.mkdir()
    cache.blob("digest").write_bytes(b"content")

    def link_later(path: Path, target: str) -> None:
        link(path, target)  # as the other download does now
        link(path, target)

    def replace_later(scratch: Path, file: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        other = threading.Thread(target=cache.record, args=("main", "0123"))
        other.start()
        other.join()
        replace(scratch, file)

    monkeypatch.setattr(Path, "symlink_to", link_later)
    cache.link("0123", "folder/file", "digest")
    monkeypatch.setattr(os, "replace", replace_later)
    cache.record("main", "0123")

    assert cache.blob("digest").is_file() and (cache.snapshot("0123") / "folder" / "file").read_bytes() == b"content"
    assert cache.commit_of("main") == "0123" and [file.name for file in (tmp_path / "refs").iterdir()] == ["main"]
