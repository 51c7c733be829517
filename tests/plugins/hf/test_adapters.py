"""Adapters of PEFT's folders on transformers models: the contract, and folders that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from enginehouse.contract.adapters import Adapter, AdapterSet, digest_of
from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.errors import AdapterRefused
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import StepEngine
from enginehouse_hf.adapters import Adapters, LayerForm, read_peft_folder
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.adapter_contract import AdaptedModel, AdapterContract
from enginehouse_testkit.contract.opening import ModelUnderTest

from .lora_folders import TARGETS, Tensors, adapted_model, lora_tensors, weights_of, write_adapter

pytestmark = pytest.mark.hf

_OPTIONS = HfOptions(device="cpu", context=64, slots=4, max_batch_tokens=128, threads=1)


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


class TestHfAdapters(AdapterContract):
    max_logit_difference = 2e-3

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tiny_model: Callable[[str], Path]) -> ModelUnderTest:
        path = tiny_model("llama")
        return ModelUnderTest(backend=HfBackend(), source=ModelSource(str(path), path), options=_OPTIONS)

    @pytest.fixture(scope="class")
    @classmethod
    def adapted(cls, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
        def open_model(path: Path) -> Runner:
            opened = HfBackend().open(ModelSource(str(path), path), _OPTIONS, lambda share, what: None)
            assert isinstance(opened, Runner)
            return opened

        return adapted_model(tmp_path_factory.mktemp("adapters"), tiny_model("llama"), open_model)


def _with(changed: Mapping[str, NDArray[np.float32] | None]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        return {name: data for name, data in {**tensors, **changed}.items() if data is not None}

    return change


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "DoRA": ({"use_dora": True}, _with({}), "use_dora"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, _with({}), "modules_to_save"),
    "bias": ({"bias": "lora_only"}, _with({}), "bias"),
    "PiSSA": ({"init_lora_weights": "pissa"}, _with({}), "init_lora_weights"),
    "activated by a text": ({"alora_invocation_tokens": "Yes"}, _with({}), "alora_invocation_tokens is not a list"),
    "activated by -1": ({"alora_invocation_tokens": [5, -1]}, _with({}), "alora_invocation_tokens has -1"),
    "not LoRA": ({"peft_type": "IA3"}, _with({}), "peft_type"),
    "rank 0": ({"r": 0}, _with({}), "rank"),
    "rank is a text": ({"r": "4"}, _with({}), "rank"),
    "alpha is a text": ({"lora_alpha": "8"}, _with({}), "lora_alpha"),
    "other rank": ({"r": 8}, _with({}), "shapes"),
    "other shape": ({}, _with({f"{_Q}.lora_A.weight": np.ones((4, 63), np.float32)}), "shapes"),
    "half a pair": ({}, _with({f"{_Q}.lora_A.weight": None}), "only one of"),
    "NaN": ({}, _with({f"{_Q}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}), "not finite"),
    "magnitudes": ({}, _with({f"{_Q}.lora_magnitude_vector": np.ones(64, np.float32)}), "plain LoRA"),
    "embedding": (
        {},
        _with({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9), np.float32)}),
        "plain LoRA",
    ),
    "output layer": ({}, _with({"base_model.model.lm_head.lora_A.weight": np.ones((4, 64), np.float32)}), "lm_head"),
    "unknown layer": (
        {},
        _with({_Q.replace("0", "9") + ".lora_A.weight": np.ones((4, 64), np.float32)}),
        "not a linear layer",
    ),
}


@pytest.fixture(scope="module")
def layers(llama: Path) -> dict[str, LayerForm]:
    """The forms of the model's layers, by name."""
    found = {}
    for name, weight in weights_of(llama).items():
        if name.removesuffix(".weight").rpartition(".")[2] in TARGETS:
            form = LayerForm(*weight.shape, torch.device("cpu"), torch.float32)
            found[name.removesuffix(".weight")] = form
    return found


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_folders_that_are_not_plain_lora_are_refused_by_name(
    llama: Path,
    layers: dict[str, LayerForm],
    tmp_path: Path,
    case: tuple[dict[str, Any], Callable[[Tensors], Tensors], str],
) -> None:
    config, change, problem = case
    folder = write_adapter(tmp_path / "refused", change(lora_tensors(llama, 1)), **config)
    with pytest.raises(AdapterRefused, match=problem) as caught:
        read_peft_folder(folder, layers)

    assert "refused" in caught.value.message and str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_and_missing_files_are_refused(
    llama: Path, layers: dict[str, LayerForm], tmp_path: Path, name: str
) -> None:
    folder = write_adapter(tmp_path / "damaged", lora_tensors(llama, 1))
    whole = (folder / name).read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"{", b"\xff" * 64, None):
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)
        with pytest.raises(AdapterRefused):
            read_peft_folder(folder, layers)
        (folder / name).write_bytes(whole)

    assert read_peft_folder(folder, layers)


def test_numbers_that_a_type_cannot_hold_are_refused(llama: Path, layers: dict[str, LayerForm], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "large", lora_tensors(llama, 1), lora_alpha=1e6)
    halves = {name: evolve(form, dtype=torch.float16) for name, form in layers.items()}

    assert read_peft_folder(folder, layers)
    with pytest.raises(AdapterRefused, match=r"large: .*_proj has numbers that are too large for torch.float16"):
        read_peft_folder(folder, halves)


@pytest.mark.parametrize("num_tokens", [(2, 2, 2), (1, 3, 2), (40, 1, 3)], ids=["equal", "unequal", "long"])
def test_adapters_of_other_layers_and_ranks_share_a_pass(
    llama: Path, tmp_path: Path, num_tokens: tuple[int, int, int]
) -> None:
    """With one sequence that has both and one without, whatever the numbers of their tokens."""
    everywhere, some = lora_tensors(llama, 1), lora_tensors(llama, 2)
    some = {name: data for name, data in some.items() if "o_proj" in name or "layers.1" in name}
    runner: Any = HfBackend().open(ModelSource(str(llama), llama), _OPTIONS, lambda share, what: None)
    one, two = (
        runner.load_adapter(write_adapter(tmp_path / name, data)) for name, data in (("1", everywhere), ("2", some))
    )
    sets: list[AdapterSet] = [((one, 1.0),), ((two, 1.0),), ((one, 0.5), (two, -2.0)), ()]
    prompts = [np.arange(5, 5 + size, dtype=np.int32) for size in (*num_tokens, 2)]

    def rows(*chosen: int) -> NDArray[np.float32]:
        spans = [Span(runner.open_sequence(), 0, prompts[number], "last", adapter=sets[number]) for number in chosen]
        logits: NDArray[np.float32] = runner.forward(spans).host().copy()
        for span in spans:
            runner.free_sequence(span.sequence)
        return logits

    alone = np.concatenate([rows(number) for number in range(4)])
    shared = {order: rows(*order) for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2))}
    runner.unload_adapter(one)
    left = rows(1, 3)
    runner.close()

    for order, logits in shared.items():
        assert np.abs(logits - alone[list(order)]).max() < 2e-3
    assert np.abs(left - alone[[1, 3]]).max() < 2e-3
    assert np.abs(alone[0] - alone[2]).max() > 0.1


def test_order_makes_tokens_of_an_adapter_neighbours_and_adapters_with_equally_many_tokens(
    llama: Path, tmp_path: Path
) -> None:
    adapters = Adapters(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    one, two, three = (adapters.load(write_adapter(tmp_path / str(n), lora_tensors(llama, n))) for n in (1, 2, 3))
    spans: list[tuple[AdapterSet, int]] = [
        (((two, 1.0),), 1),
        (((three, 0.5),), 2),
        ((), 4),
        (((one, 1.0),), 1),
        (((two, 0.5),), 1),
        (((one, 0.0),), 3),
    ]

    assert adapters.order(spans) == [2, 5, 3, 0, 4, 1]
    assert adapters.order([((), 3), ((), 1), ((), 2)]) == [0, 1, 2]


def test_adapters_are_copied_together_only_when_one_is_not_among_those_of_before(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = Adapters(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    handles = [adapters.load(write_adapter(tmp_path / str(n), lora_tensors(llama, n))) for n in range(4)]
    made: list[tuple[int, ...]] = []
    zeros = torch.Tensor.new_zeros

    def counted(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        made.append(shape)
        return zeros(tensor, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)

    def copied_by(*sizes: int) -> int:
        made.clear()
        adapters.begin([(((handle, 1.0),), size) for handle, size in zip(handles, sizes, strict=False) if size])
        return len(made)

    assert copied_by(2) == copied_by(1, 2, 3) == 0
    assert copied_by(1, 1, 1) > 0
    assert copied_by(1, 1) == copied_by(0, 3, 3) == copied_by(1, 0, 1) == copied_by(1, 1, 2, 3) == 0
    assert copied_by(0, 0, 1, 1) > 0


def _saved_by_peft(model: Path, folder: Path, config: Any) -> Any:
    """A model of PEFT with a random adapter of that configuration, which is saved to the folder."""
    import peft

    torch.manual_seed(0)
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config).eval()
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    made.save_pretrained(folder)
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's use of transformers
@pytest.mark.parametrize("is_stabilised", [False, True])
def test_logits_are_those_of_peft_and_of_its_merged_model(llama: Path, tmp_path: Path, is_stabilised: bool) -> None:
    """A folder that PEFT wrote, with its own patterns of ranks and alphas."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(TARGETS),
        rank_pattern={"o_proj": 2},
        alpha_pattern={"v_proj": 16},
        use_rslora=is_stabilised,
    )
    model = _saved_by_peft(llama, tmp_path, config)
    runner: Any = HfBackend().open(ModelSource(str(llama), llama), _OPTIONS, lambda share, what: None)
    prompt = np.arange(5, 25, dtype=np.int32)
    rows = {}
    for adapter in ((), ((runner.load_adapter(tmp_path), 1.0),)):
        span = Span(runner.open_sequence(), 0, prompt, "all", adapter=adapter)
        rows[bool(adapter)] = runner.forward([span]).host()
    runner.close()
    with torch.inference_mode():
        expected = model(torch.from_numpy(prompt).long()[None]).logits[0].numpy()
        merged = model.merge_and_unload()(torch.from_numpy(prompt).long()[None]).logits[0].numpy()

    assert np.abs(rows[True] - expected).max() < 1e-3
    assert np.abs(merged - expected).max() < 1e-3
    assert np.abs(rows[False] - expected).max() > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's use of transformers
@pytest.mark.parametrize("place", [0, 7, 18])
def test_text_of_an_activated_adapter_is_that_of_peft(llama: Path, tmp_path: Path, place: int) -> None:
    """Greedy, over the engine; the invocation tokens stand at the start, in the middle or at the end of the prompt."""
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=list(TARGETS), alora_invocation_tokens=[30, 31]
    )
    model = _saved_by_peft(llama, tmp_path, config)
    prompt = np.arange(5, 25)
    prompt[place : place + 2] = 30, 31
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.from_numpy(prompt)[None], max_new_tokens=12, do_sample=False, eos_token_id=-1
        )
    runner: Any = HfBackend().open(ModelSource(str(llama), llama), _OPTIONS, lambda share, what: None)
    engine, adapter = StepEngine(runner, EngineSettings(), {}), Adapter("a", str(tmp_path), digest_of(tmp_path))
    texts = {}
    for name, adapters in (("base", ()), ("adapter", (adapter,))):
        stopping = StopParams(max_tokens=12, ignore_eos=True)
        sampling = SamplingParams(temperature=0)
        engine.add(
            EngineRequest(request_id=name, adapters=adapters, stopping=stopping, sampling=sampling), prompt.tolist()
        )
        texts[name] = []
        while engine.has_work():
            deltas = [event for _, event in engine.step() if isinstance(event, TextDelta)]
            texts[name] += [token_id for delta in deltas for token_id in delta.token_ids]
    engine.close()

    assert texts["adapter"] == output[0, len(prompt) :].tolist()
    assert texts["adapter"] != texts["base"]
