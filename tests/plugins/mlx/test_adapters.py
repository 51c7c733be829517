"""Adapters on mlx-lm models: the contract on plain and quantised layers, both formats, and folders that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.adapters import AdapterKeeper
from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.errors import AdapterRefused
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract
from enginehouse_testkit.contract.opening import ModelUnderTest

pytestmark = pytest.mark.mlx

Tensors = dict[str, NDArray[np.float32]]

_TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": list(_TARGETS),
    "rank_pattern": {"o_proj": 2},
    "bias": "none",
}
_OWN: dict[str, Any] = {"fine_tune_type": "lora", "num_layers": 4, "lora_parameters": {"rank": 8, "scale": 3.0}}
_OPTIONS = MlxOptions(context=64, slots=4, max_batch_tokens=128)


def load(file: Path) -> Tensors:
    import mlx.core as mx

    loaded: Any = mx.load(str(file))
    return {name: np.asarray(data) for name, data in loaded.items()}


def save(file: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    import mlx.core as mx

    mx.save_safetensors(str(file), {name: mx.array(data) for name, data in tensors.items()}, {"format": "mlx"})


def weights_of(model: Path) -> Tensors:
    return {name: data for file in sorted(model.glob("*.safetensors")) for name, data in load(file).items()}


def halves(weights: Tensors, seed: int, rank: Callable[[str], int]) -> dict[str, tuple[Any, Any]]:
    """(rank, inputs) and (outputs, rank) of each target, by the name of the layer."""
    rng, made = np.random.default_rng(seed), {}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in _TARGETS:
            sizes = (rank(module), weight.shape[1]), (weight.shape[0], rank(module))
            made[module] = tuple((rng.standard_normal(size) / 8).astype(np.float32) for size in sizes)
    return made


def peft_rank(module: str) -> int:
    return 2 if "o_proj" in module else 4


def write_peft(folder: Path, weights: Tensors, seed: int, **config: Any) -> Path:
    tensors: Tensors = {}
    for module, (a, b) in halves(weights, seed, peft_rank).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**_PEFT, **config}))
    save(folder / "adapter_model.safetensors", tensors)
    return folder


def write_own(folder: Path, weights: Tensors, seed: int, **config: Any) -> Path:
    tensors: Tensors = {}
    for module, (a, b) in halves(weights, seed, lambda _: 8).items():
        tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"] = a.T, b.T
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**_OWN, **config}))
    save(folder / "adapters.safetensors", tensors)
    return folder


def update_of(folder: Path, module: str) -> NDArray[np.float32] | None:
    """What an adapter adds to the weight of a layer."""
    if (folder / "adapters.safetensors").is_file():
        tensors, scale = load(folder / "adapters.safetensors"), 3.0
        a, b = (tensors.get(f"{module}.{half}") for half in ("lora_a", "lora_b"))
        return None if a is None or b is None else (scale * (a @ b).T).astype(np.float32)
    tensors, scale = load(folder / "adapter_model.safetensors"), 8 / peft_rank(module)
    a, b = (tensors.get(f"base_model.model.{module}.lora_{half}.weight") for half in "AB")
    return None if a is None or b is None else (scale * (b @ a)).astype(np.float32)


def open_model(model: Path, options: MlxOptions = _OPTIONS) -> Runner:
    opened = MlxBackend().open(ModelSource(str(model), model), options, lambda share, what: None)
    assert isinstance(opened, Runner)
    return opened


def quantised(model: Path, folder: Path) -> tuple[Path, Path]:
    """The model with layers quantised by mlx-lm, and with these weights unpacked again."""
    from mlx.utils import tree_flatten
    from mlx_lm import load as load_model
    from mlx_lm.utils import dequantize_model, quantize_model

    config = json.loads((model / "config.json").read_text())
    opened: Any = load_model(str(model))
    packed, packed_config = quantize_model(
        opened[0], config, 32, 4, quant_predicate=lambda path, _: path.rpartition(".")[2] in _TARGETS
    )
    for name, about in (("packed", packed_config), ("unpacked", config)):
        weights: Any = tree_flatten((packed if name == "packed" else dequantize_model(packed)).parameters())
        shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / name / "config.json").write_text(json.dumps(about))
        save(folder / name / "model.safetensors", dict(weights))
    return folder / "packed", folder / "unpacked"


class _MlxAdapters(AdapterContract):
    """One adapter of each format: their ranks and scales differ, PEFT's ranks between layers as well.

    A class that is collected has a fixture ``models``: the model under test, and one with the same weights unpacked.
    """

    max_logit_difference = 2e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, models: tuple[Path, Path]) -> ModelUnderTest:
        return ModelUnderTest(backend=MlxBackend(), source=ModelSource(str(models[0]), models[0]), options=_OPTIONS)

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        folder, weights = tmp_path_factory.mktemp("adapters"), weights_of(models[1])
        first, second = write_peft(folder / "peft", weights, 1), write_own(folder / "own", weights, 2)

        def open_merged(merged: Mapping[Path, float]) -> Runner:
            copied = folder / f"merged-{len(list(folder.iterdir()))}"
            shutil.copytree(models[1], copied, ignore=shutil.ignore_patterns("*.safetensors*"))
            changed = dict(weights)
            for path, scale in merged.items():
                for name in weights:
                    if (update := update_of(path, name.removesuffix(".weight"))) is not None:
                        changed[name] = changed[name] + np.float32(scale) * update
            save(copied / "model.safetensors", changed)
            return open_model(copied)

        damaged = (write_peft(folder / "dora", weights, 1, use_dora=True), models[0])
        activated = write_peft(folder / "activated", weights, 3, alora_invocation_tokens=[9, 10])
        return AdaptedModel((first, second), open_merged, damaged, (activated, (9, 10)))


class TestPlainLayers(_MlxAdapters):
    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, random_model: Callable[..., Path]) -> tuple[Path, Path]:
        model = random_model("llama", num_hidden_layers=2, layer_types=None, sliding_window=None)
        return model, model


class TestQuantisedLayers(_MlxAdapters):
    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        return quantised(random_model("qwen3", num_hidden_layers=2), tmp_path_factory.mktemp("quantised"))

    def test_the_layers_are_quantised(self, runner: Runner) -> None:
        assert runner.info.metadata["quantization"] == "4 bits, groups of 32"


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Path]) -> Path:
    return random_model("llama", num_hidden_layers=2, layer_types=None, sliding_window=None)


@pytest.fixture(scope="module")
def runner(llama: Path) -> Iterator[Runner]:
    opened = open_model(llama)
    yield opened
    opened.close()


_Q = "model.layers.0.self_attn.q_proj"
_A = f"base_model.model.{_Q}.lora_A.weight"
_ONES = np.ones((4, 64), np.float32)
REFUSED: dict[str, tuple[Callable[..., Path], dict[str, Any], Mapping[str, NDArray[Any] | None], str]] = {
    "DoRA": (write_peft, {"use_dora": True}, {}, "use_dora"),
    "modules_to_save": (write_peft, {"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "bias": (write_peft, {"bias": "lora_only"}, {}, "bias"),
    "not LoRA": (write_peft, {"peft_type": "IA3"}, {}, "peft_type"),
    "rank 0": (write_peft, {"r": 0}, {}, "rank"),
    "endless alpha": (write_peft, {"lora_alpha": 10**400}, {}, "lora_alpha"),
    "other shape": (write_peft, {}, {_A: np.ones((4, 63), np.float32)}, "shapes"),
    "half a pair": (write_peft, {}, {_A: None}, "only one of"),
    "NaN": (write_peft, {}, {_A: np.full((4, 64), np.nan, np.float32)}, "not finite"),
    "integers": (write_peft, {}, {_A: np.ones((4, 64), np.int32)}, "of the type"),
    "output layer": (write_peft, {}, {"base_model.model.lm_head.lora_A.weight": _ONES}, "lm_head"),
    "unknown layer": (write_peft, {}, {_A.replace("0", "9"): _ONES}, "not a linear layer"),
    "own: DoRA": (write_own, {"fine_tune_type": "dora"}, {}, "fine_tune_type"),
    "own: all weights": (write_own, {}, {f"{_Q}.weight": np.ones((64, 64), np.float32)}, "plain LoRA"),
    "own: no parameters": (write_own, {"lora_parameters": None}, {}, "lora_parameters"),
    "own: rank 0": (write_own, {"lora_parameters": {"rank": 0, "scale": 1}}, {}, "rank"),
    "own: scale is a text": (write_own, {"lora_parameters": {"rank": 8, "scale": "1"}}, {}, "scale"),
    "own: other rank": (write_own, {"lora_parameters": {"rank": 4, "scale": 1}}, {}, "shape"),
    "own: half a pair": (write_own, {}, {f"{_Q}.lora_b": None}, "only one of"),
    "own: infinite": (write_own, {}, {f"{_Q}.lora_a": np.full((64, 8), np.inf, np.float32)}, "not finite"),
    "own: unknown layer": (write_own, {}, {"lm_head.lora_a": np.ones((64, 8), np.float32)}, "not a linear layer"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_folders_that_are_not_plain_lora_are_refused_by_name(
    llama: Path,
    runner: Runner,
    tmp_path: Path,
    case: tuple[Callable[..., Path], dict[str, Any], Mapping[str, NDArray[Any] | None], str],
) -> None:
    write, config, changed, problem = case
    folder = write(tmp_path / "refused", weights_of(llama), 1, **config)
    (file,) = folder.glob("*.safetensors")
    save(file, {name: data for name, data in {**load(file), **changed}.items() if data is not None})
    assert isinstance(runner, AdapterKeeper)
    with pytest.raises(AdapterRefused, match=problem) as caught:
        runner.load_adapter(folder)

    assert "refused" in caught.value.message and str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("write", [write_peft, write_own])
def test_damaged_and_missing_files_are_refused(
    llama: Path, runner: Runner, tmp_path: Path, write: Callable[..., Path]
) -> None:
    folder = write(tmp_path / "damaged", weights_of(llama), 1)
    assert isinstance(runner, AdapterKeeper)
    for file in folder.iterdir():
        whole = file.read_bytes()
        for data in (b"", whole[: len(whole) // 2], b"{", b"[]", b"\xff" * 64, None):
            file.unlink()
            if data is not None:
                file.write_bytes(data)
            with pytest.raises(AdapterRefused) as caught:
                runner.load_adapter(folder)
            assert str(tmp_path) not in caught.value.message
            file.write_bytes(whole)

    runner.unload_adapter(runner.load_adapter(folder))


def test_rows_with_none_one_and_two_adapters_share_a_pass(llama: Path, runner: Runner, tmp_path: Path) -> None:
    """Also where the adapters change different layers."""
    assert isinstance(runner, AdapterKeeper)
    weights = weights_of(llama)
    some = {name: data for name, data in weights.items() if "q_proj" in name or "layers.1." in name}
    first, second = (
        runner.load_adapter(folder)
        for folder in (write_peft(tmp_path / "one", weights, 1), write_own(tmp_path / "two", some, 2))
    )
    sets = [((first, 0.7), (second, -0.3)), (), ((second, 1.0),), ((first, 1.0),)]
    prompts = [np.arange(start, start + 8, dtype=np.int32) for start in (5, 20, 40, 60)]

    def run(chosen: Sequence[int]) -> NDArray[np.float32]:
        sequences = [runner.open_sequence() for _ in chosen]
        spans = [
            Span(sequence, 0, prompts[number], "all", adapter=sets[number])
            for sequence, number in zip(sequences, chosen, strict=True)
        ]
        rows = runner.forward(spans).host().copy()
        for sequence in sequences:
            runner.free_sequence(sequence)
        return rows

    together, alone = run(range(4)), np.concatenate([run([number]) for number in range(4)])
    for handle in (first, second):
        runner.unload_adapter(handle)

    assert np.abs(together - alone).max() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types_of_weights_give_about_the_same_logits(
    llama: Path, runner: Runner, tmp_path: Path, dtype: Literal["bfloat16", "float16"]
) -> None:
    folder = write_peft(tmp_path / "adapter", weights_of(llama), 1)
    lower = open_model(llama, attrs.evolve(_OPTIONS, dtype=dtype))
    expected, changed = logits(runner, folder, 1.0), logits(lower, folder, 1.0)
    lower.close()

    assert np.abs(changed - expected).max() < 0.1 * np.abs(expected - logits(runner, folder, 0.0)).max()


def logits(opened: Runner, adapter: Path, scale: float) -> NDArray[np.float32]:
    """Rows of a short prompt with an adapter."""
    assert isinstance(opened, AdapterKeeper)
    handle, sequence = opened.load_adapter(adapter), opened.open_sequence()
    span = Span(sequence, 0, np.arange(5, 17, dtype=np.int32), "all", adapter=((handle, scale),))
    rows = opened.forward([span]).host().copy()
    opened.free_sequence(sequence)
    opened.unload_adapter(handle)
    return rows


def test_stacked_experts_are_refused_and_their_router_is_not(random_model: Callable[..., Path], tmp_path: Path) -> None:
    model = random_model("qwen3_moe")
    opened, weights = open_model(model), weights_of(model)
    sizes = {"model.layers.0.mlp.gate": (4, 64), "model.layers.0.mlp.switch_mlp.up_proj": (48, 64)}
    assert isinstance(opened, AdapterKeeper)
    folders = []
    for name, (outputs, inputs) in sizes.items():
        tensors = {f"{name}.lora_a": np.ones((inputs, 8), np.float32), f"{name}.lora_b": np.ones((8, outputs))}
        folders.append(write_own(tmp_path / name, weights, 1))
        save(folders[-1] / "adapters.safetensors", {name: data.astype(np.float32) for name, data in tensors.items()})

    assert opened.load_adapter(folders[0])
    with pytest.raises(AdapterRefused, match=r"switch_mlp\.up_proj"):
        opened.load_adapter(folders[1])
    opened.close()
