"""Folders as people have them: shards, templates in their files, weights that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.contract.backend import ModelSource, Runner
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.backend import HfBackend, HfOptions

TinyModel = Callable[[str], Path]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def opened(path: Path) -> Runner:
    options = HfOptions(threads=1, slots=1, context=64, device="cpu")
    return HfBackend().open(ModelSource(str(path), path), options, lambda *_: None)


def test_a_folder_needs_no_generation_config_and_may_have_shards(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    (folder / "generation_config.json").unlink()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        part = {name: array for name, array in weights.items() if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"its weights need the name model\.safetensors, or the file model\.s"):
        opened(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    opened(folder).close()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"incomplete: 1 of 2 files are missing \(model-00002-of-00002"):
        opened(folder)


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({"chat_template.json": '{"chat_template": "J"}'}, {"default": "J"}),
        ({"chat_template.jinja": "D", "chat_template.json": '{"chat_template": "J"}'}, {"default": "D"}),
        (
            {"chat_template.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"},
            {"default": "D", "tool_use": "T"},
        ),
        (
            [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
            {"default": "D", "tool_use": "T"},
        ),
    ],
)
def test_templates_are_found_in_all_their_files(folder: Path, files: object, templates: dict[str, str]) -> None:
    (folder / "chat_template.jinja").unlink()
    if isinstance(files, dict):
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": files}))
    runner = opened(folder)

    assert runner.info.chat_templates == templates
    runner.close()


def test_weights_that_do_not_belong_to_the_configuration_are_an_error(folder: Path) -> None:
    """transformers draws at random what is missing, and says so in its log only."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3}, r"its files lack 9 tensors of a LlamaForCausalLM \(model\.layers\.2\.input"),
        ({"vocab_size": 10}, r"do not fit together: lm_head\.weight is \[400, 64\], not \[10, 64\]"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelLoadError, match=message):
            opened(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file({name: array for name, array in weights.items() if "1.mlp.up" not in name}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lack 1 tensors of a LlamaForCausalLM \(model\.layers\.1\.mlp\.up_proj"):
        opened(folder)
