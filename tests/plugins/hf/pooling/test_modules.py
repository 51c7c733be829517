"""Folders of sentence-transformers: each module, in its new and its old form, gives the rows of the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.errors import ModelLoadError

pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.hf, pytest.mark.slow]

Folder = Callable[..., Path]
Opened = Callable[..., Any]
Saved = Callable[..., Any]

_WIDTH = 48
_OLD_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_PROMPTS = {"query": "who is the river: ", "document": ""}


@pytest.fixture(scope="module")
def save(random_encoder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A function that saves a SentenceTransformer with modules after the transformer; returns it and its folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    def make(modules: Sequence[Any], **settings: Any) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("saved") / "model"
        transformer = Transformer(str(random_encoder("bert")), max_seq_length=40)
        model = SentenceTransformer(modules=[transformer, *modules], device="cpu", **settings)
        model.eval().save_pretrained(str(folder))
        return model, folder

    return make


def assert_rows(found: Any, expected: Any) -> None:
    scale = max(1.0, float(np.abs(expected).max()))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * scale


@pytest.mark.parametrize("modes", [[mode] for mode in _OLD_KEYS] + [["cls", "mean", "max"], ["lasttoken", "cls"]])
def test_pooling_modes(
    save: Saved, open_pooler: Opened, arranged: Any, short_texts: list[str], modes: list[str]
) -> None:
    """By ``pooling_mode``, and by the boolean keys of older files; with prompts included and left out."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    for include_prompt in (True, False):
        model, folder = save([Pooling(_WIDTH, modes, include_prompt)], prompts=_PROMPTS)
        pooler = open_pooler(folder)
        prompted = [_PROMPTS["query"] + text for text in short_texts]
        num_prompt = 0 if include_prompt else len(pooler.tokenizer.encode(_PROMPTS["query"], False))
        expected = model.encode(short_texts, prompt_name="query")

        assert pooler.capabilities.max_tokens == 40
        assert pooler.capabilities.include_prompt is include_prompt
        assert pooler.capabilities.pooling == "+".join(modes)
        assert dict(pooler.capabilities.prompts) == _PROMPTS
        assert not pooler.capabilities.is_normalized
        assert_rows(pooler.pool(arranged(pooler, prompted, num_prompt=num_prompt)), expected)
    if sorted(modes, key=list(_OLD_KEYS).index) == modes:  # the order in which the old form concatenates
        old = {"word_embedding_dimension": _WIDTH, **{key: mode in modes for mode, key in _OLD_KEYS.items()}}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(old))
        pooler = open_pooler(folder)
        assert_rows(pooler.pool(arranged(pooler, short_texts)), model.encode(short_texts))


def test_modules_after_pooling(save: Saved, open_pooler: Opened, arranged: Any, short_texts: list[str]) -> None:
    """Dense layers with and without bias and residual, layer normalisation, dropout, normalisation."""
    import torch
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

    torch.manual_seed(1)
    norm = LayerNorm(32)
    torch.nn.init.normal_(norm.norm.weight)
    modules = [
        Pooling(_WIDTH, "mean"),
        Dense(_WIDTH, 32),
        Dropout(0.5),
        norm,
        Dense(32, 24, bias=False, activation_function=torch.nn.GELU()),
        Dense(24, 24, activation_function=torch.nn.Identity(), use_residual=True),
        Normalize(),
    ]
    model, folder = save(modules)
    pooler = open_pooler(folder)

    assert pooler.capabilities.dimensions == 24
    assert pooler.capabilities.is_normalized
    assert_rows(pooler.pool(arranged(pooler, short_texts)), model.encode(short_texts))


def test_older_folders(save: Saved, open_pooler: Opened, arranged: Any, short_texts: list[str], tmp_path: Path) -> None:
    """The transformer in a folder of its own, older names of files and classes, lower case, a fixed shorter size."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    _, folder = save([Pooling(_WIDTH, "mean"), Normalize()])
    old = tmp_path / "old"
    (old / "0_Transformer").mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.name not in {"modules.json", "config_sentence_transformers.json", "README.md"}:
            shutil.copy(file, old / "0_Transformer")
    shutil.copytree(folder / "1_Pooling", old / "1_Pooling")
    (old / "0_Transformer" / "sentence_bert_config.json").unlink()
    text = {"max_seq_length": 12, "do_lower_case": True}
    (old / "0_Transformer" / "sentence_roberta_config.json").write_text(json.dumps(text))
    kinds = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (old / "modules.json").write_text(json.dumps(modules))
    (old / "2_Normalize").mkdir()
    (old / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 20}))
    texts = [*short_texts, "THE RIVER"]
    pooler = open_pooler(old, dimension_choices=(16, 8, 20))

    assert pooler.capabilities.max_tokens == 12
    assert pooler.capabilities.dimensions == 20
    assert pooler.capabilities.dimension_choices == (8, 16)
    assert not pooler.capabilities.is_normalized
    assert_rows(pooler.pool(arranged(pooler, texts)), SentenceTransformer(str(old), device="cpu").encode(texts))


def test_settings_override_the_files(save: Saved, open_pooler: Opened) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    _, folder = save([Pooling(_WIDTH, "mean")])
    pooler = open_pooler(folder, pooling="cls+max", context=50)

    assert (pooler.capabilities.pooling, pooler.capabilities.dimensions) == ("cls+max", 2 * _WIDTH)
    assert pooler.capabilities.max_tokens == 50
    with pytest.raises(ModelLoadError, match=r"context = 500 .*\(96\)"):
        open_pooler(folder, context=500)
    with pytest.raises(ModelLoadError, match="mode 'middle' is unknown"):
        open_pooler(folder, pooling="middle")


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "middle"}, "'middle' is unknown"),
        ("modules.json", {"type": "their_code.Pooling2"}, "modules of the type Pooling2"),
        ("modules.json", {"path": "../outside"}, "outside the model's folder"),
        ("modules.json", {"path": 3}, "not a list of objects"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "a SparseEncoder of"),
        ("config_sentence_transformers.json", {"default_prompt_name": "passage"}, "'passage', which is not"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length is '-1'"),
        ("2_Dense/config.json", {"activation_function": "their_code.Swish"}, "not a class of torch.nn"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Nothing"}, "no activation 'Nothing'"),
        ("2_Dense/config.json", {"in_features": 10**9}, "not a size"),
        ("2_Dense/config.json", {"out_features": 17}, "weights do not fit"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "only sentence_embedding"),
    ],
)
def test_what_would_give_wrong_rows_is_refused(
    dense_folder: Path, open_pooler: Opened, tmp_path: Path, *, file: str, changed: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(dense_folder, tmp_path / "model"))
    data = json.loads((folder / file).read_text())
    (data[1] if isinstance(data, list) else data).update(changed)
    (folder / file).write_text(json.dumps(data))

    with pytest.raises(ModelLoadError, match=message):
        open_pooler(folder)


@pytest.fixture(scope="module")
def dense_folder(save: Saved) -> Path:
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling

    return save([Pooling(_WIDTH, "mean"), Dense(_WIDTH, 16)])[1]


def test_pickled_weights_of_a_module_are_refused(dense_folder: Path, open_pooler: Opened, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(dense_folder, tmp_path / "model"))
    torch.save(load_file(folder / "2_Dense" / "model.safetensors"), folder / "2_Dense" / "pytorch_model.bin")
    (folder / "2_Dense" / "model.safetensors").unlink()

    with pytest.raises(ModelLoadError, match="is a pickle"):
        open_pooler(folder)
    assert open_pooler(folder, trust_remote_code=True).capabilities.dimensions == 16
