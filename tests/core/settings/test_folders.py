"""Models in folders: their names in the layouts of other servers, what is refused, and presets."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import load_settings
from enginehouse.settings.folders import scan_folders

GGUF = b"GGUF\3\0\0\0" + bytes(32)
TENSORS = (2).to_bytes(8, "little") + b"{}"


def _lay(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


LAYOUTS = {
    "llama-server": (
        {
            "llama-3.2-1b-Q4_K_M.gguf": GGUF,
            "gemma-3-4b-it-Q8_0/gemma-3-4b-it-Q8_0.gguf": GGUF,
            "gemma-3-4b-it-Q8_0/mmproj-F16.gguf": GGUF,
            "Kimi/Kimi-UD-IQ1_S-00001-of-00002.gguf": GGUF,
            "Kimi/Kimi-UD-IQ1_S-00002-of-00002.gguf": GGUF,
        },
        {"llama-3.2-1b-Q4_K_M": (), "gemma-3-4b-it-Q8_0": (), "Kimi": ()},
        {"mmproj-F16.gguf"},
    ),
    "LM Studio": (
        {
            "pub/Qwen3-GGUF/Qwen3-Q4_K_M.gguf": GGUF,
            "pub/Qwen3-GGUF/Qwen3-Q8_0.gguf": GGUF,
            "pub/one/file.gguf": GGUF,
            "other/one/file.gguf": GGUF,
        },
        {
            "Qwen3-GGUF:Q4_K_M": ("pub/Qwen3-GGUF:Q4_K_M",),
            "Qwen3-GGUF:Q8_0": ("pub/Qwen3-GGUF:Q8_0",),
            "pub/one": (),
            "other/one": (),
        },
        set(),
    ),
    "oMLX": (
        {
            "flat-4bit/config.json": b"{}",
            "flat-4bit/model.safetensors": TENSORS,
            "mlx-community/deep/config.json": b"{}",
            "mlx-community/deep/model.safetensors": TENSORS,
            "mlx-community/cut/config.json": b"{}",
            "mlx-community/cut/model.safetensors": b"\xff" * 20,
        },
        {"flat-4bit": (), "deep": ("mlx-community/deep",)},
        {"cut"},
    ),
    "hub": (
        {
            "models--owner--name/refs/main": b"abc",
            "models--owner--name/snapshots/abc/config.json": b"{}",
            "models--owner--name/snapshots/abc/model.safetensors": TENSORS,
            "models--owner--many/refs/main": b"abc",
            "models--owner--many/snapshots/abc/Q4_K_M/x-Q4_K_M.gguf": GGUF,
            "models--owner--gone/refs/main": b"../..",
        },
        {"owner/name": (), "owner/many:Q4_K_M": ()},
        {"models--owner--gone"},
    ),
    "bad": (
        {
            "html.gguf": b"<html>",
            "cut.gguf": b"GGUF\3",
            "part-00002-of-00002.gguf": GGUF,
            "half-00001-of-00002.gguf": GGUF,
            "zero-00001-of-00000.gguf": GGUF,
            "pickle/config.json": b"{}",
            "pickle/pytorch_model.bin": b"",
            "adapter/adapter_config.json": b"{}",
            "adapter/adapter_model.safetensors": TENSORS,
            "index/config.json": b"{}",
            "index/model-1.safetensors": TENSORS,
            "index/model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-2.safetensors"}}).encode(),
            "deep/er/and/deeper.gguf": GGUF,
            "notes.txt": b"",
        },
        {"zero": ()},
        {"html.gguf", "cut.gguf", "part-00002-of-00002.gguf", "half-00001-of-00002.gguf"}
        | {"pickle", "adapter", "index"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_servers(layout: str, tmp_path: Path) -> None:
    files, names, unserved = LAYOUTS[layout]

    scan = scan_folders([_lay(tmp_path, files)])

    assert {model.name: model.aliases for model in scan.models} == names
    assert {Path(one.path).name for one in scan.unserved} == unserved
    assert all(one.reason for one in scan.unserved)


def test_named_pipe_as_a_revision_of_the_hubs_cache_does_not_stop_the_scan(tmp_path: Path) -> None:
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir(parents=True)
    os.mkfifo(refs / "main")

    assert [Path(one.path).name for one in scan_folders([tmp_path]).unserved] == ["models--owner--name"]


def test_a_missing_folder_and_links_do_not_stop_the_scan(tmp_path: Path) -> None:
    _lay(tmp_path, {"a.gguf": GGUF})
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "same.gguf").symlink_to(tmp_path / "a.gguf")
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "none")

    scan = scan_folders([tmp_path, tmp_path / "none"])

    assert [model.name for model in scan.models] == ["a"]
    assert "same file" in next(one.reason for one in scan.unserved if one.path.endswith("same.gguf"))
    assert any(one.path.endswith("none") for one in scan.unserved)


NAMES = st.sampled_from(
    [
        "a",
        "b.gguf",
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
        "x-00000-of-00001.gguf",
        "mmproj-a.gguf",
        "config.json",
        "w.safetensors",
        "models--o--n",
        "refs",
        "main",
        "*.gguf",
        " .gguf",
        ".gguf",
        "é\n.gguf",
        "adapter_config.json",
        "model.safetensors.index.json",
        "snapshots",
    ]
)
DATA = st.sampled_from([b"", GGUF, TENSORS, b"{}", b"[]", b"{" * 5000, b"\xff" * 9, b'{"weight_map": {"a": 1}}', b".."])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=4).map(tuple), DATA, max_size=14))
def test_any_tree_is_scanned_and_each_file_is_listed_once(tree: dict[tuple[str, ...], bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for steps, data in tree.items():
            path = root.joinpath(*steps)
            if not path.exists() and all(not parent.is_file() for parent in path.parents):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

        scan = scan_folders([root, root])

        listed = [str(file) for model in scan.models for file in model.files]
        refused = [one.path for one in scan.unserved if "same file" not in one.reason]
        names = [name for model in scan.models for name in (model.name, *model.aliases)]
        assert len(listed) == len(set(listed))
        assert len(names) == len(set(names))
        assert not {*listed} & {*refused}
        for file in root.glob("*.gguf"):
            part_of_refused = "-of-" in file.name and any("-of-" in one for one in refused)
            assert file.is_dir() or str(file) in {*listed, *refused} or part_of_refused, file


CONFIG = """
[server]
models_dir = "models"

[model_defaults]
ttl = 60
defaults = { temperature = 0.5, top_k = 3 }

[models."m*"]
context = 99
defaults = { top_k = 4 }

[models.mine]
load = "eager"

[models.b]
source = "elsewhere.gguf"
"""


def test_presets_apply_to_configured_and_found_models(tmp_path: Path) -> None:
    _lay(tmp_path, {"models/mine.gguf": GGUF, "models/b.gguf": GGUF, "models/c.gguf": GGUF})
    (tmp_path / "e.toml").write_text(CONFIG, encoding="utf-8")

    read = load_settings(tmp_path / "e.toml", {"ENGINEHOUSE_MODEL_DEFAULTS__SLOTS": "2"})

    shown = {name: (one.ttl, one.context, one.slots, one.load, one.origin) for name, one in read.models.items()}
    assert shown == {
        "mine": (60.0, 99, 2, "eager", "folder"),
        "b": (60.0, None, 2, "eager", "settings"),
        "c": (60.0, None, 2, "lazy", "folder"),
    }
    assert read.models["mine"].defaults == {"temperature": 0.5, "top_k": 4}
    assert "the name 'b' is taken" in read.presets.unserved[0].reason


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[model_defaults]\nsource = "x"', "model_defaults.source"),
        ("[model_defaults]\nttl = 0", "model_defaults.ttl"),
        ('[models."a*"]\ncontext = "x"', "models.a*.context"),
        ('[models."a*"]\nsource = "x"', "models.a*.source"),
        ("[models.a]\nttl = 5", "models.a.source"),
        ('[server]\nmodels_dir = [""]\nx = 1', "server.x"),
        ("[server]\nmodels_dir = 1", "server.models_dir"),
        ("[presets]", "presets"),
    ],
)
def test_wrong_presets_are_named(text: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path / "e.toml", {})

    assert error.value.path == path
