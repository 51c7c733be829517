"""Draft heads: their drafts are those of the same arithmetic over the whole text, without caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Runner, Span
from enginehouse.contract.drafter import DraftTask
from enginehouse.contract.errors import ModelLoadError
from enginehouse_testkit.head_contract import HeadContract

torch = pytest.importorskip("torch")
from .models import MTP_KINDS, QWEN_KINDS, SIZE, VOCAB_SIZE, change, save, with_mtp_as_layer  # noqa: E402 - they need torch

pytestmark = [pytest.mark.hf, pytest.mark.timeout(300)]

NUM_TOKENS = 4


class TestEagle3(HeadContract):
    @pytest.fixture
    def open_headed(self, headed_model: Callable[..., Path], open_model: Callable[..., Any]) -> Callable[[], Runner]:
        return lambda: open_model(headed_model("llama"))

    @pytest.fixture(scope="class")
    @classmethod
    def head_source(cls, eagle3: Callable[..., Path]) -> ModelSource:
        return ModelSource("head", eagle3())


class TestMtp(HeadContract):
    @pytest.fixture(params=MTP_KINDS)
    def open_headed(
        self, request: pytest.FixtureRequest, headed_model: Callable[..., Path], open_model: Callable[..., Any]
    ) -> Callable[[], Runner]:
        return lambda: open_model(headed_model(request.param))


@pytest.fixture
def token_ids() -> NDArray[np.int32]:
    return (np.arange(30, dtype=np.int32) * 37 + 11) % VOCAB_SIZE


def drafted(runner: Any, source: Path | None, token_ids: NDArray[np.int32]) -> list[int]:
    """What the runner drafts after a text."""
    head = runner.open_head(source and ModelSource(str(source), source), max_tokens=NUM_TOKENS, min_probability=0.0)
    sequence = runner.open_sequence()
    runner.forward([Span(sequence, 0, token_ids[:-1])])
    (draft,) = head.propose([DraftTask(head.open(token_ids, ()), token_ids, sequence, NUM_TOKENS)])
    return list(draft.token_ids)


# -- references --------------------------------------------------------------------------------------


def of_transformers(folder: Path, token_ids: NDArray[np.int32]) -> tuple[Any, Any]:
    """A model as transformers computes it, and its result for all tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model, model.model(torch.from_numpy(token_ids.astype(np.int64))[None], output_hidden_states=True)


def chained(token_ids: NDArray[np.int32], features: Any, step: Callable[[Any, Any], tuple[Any, Any]]) -> list[int]:
    """Draft greedily: ``step`` gets all tokens and features so far, and returns the last state and the next token."""
    ids, drafts = torch.from_numpy(token_ids.astype(np.int64))[1:], []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            state, token_id = step(ids, features)
            drafts.append(int(token_id))
            ids, features = torch.cat([ids, token_id[None]]), torch.cat([features, state[None]])
    return drafts


def normed(states: Any, weight: Any) -> Any:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(heads: Any) -> Any:
    """Rotary embedding of (num_heads, T, 16) with base 10,000."""
    angles = torch.arange(heads.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    return heads * cos + torch.cat([-heads[..., 8:], heads[..., :8]], -1) * sin


def eagle3_by_hand(folder: Path, head: Path, token_ids: NDArray[np.int32], *, keeps_norm: bool) -> list[int]:
    from safetensors.torch import load_file

    model, result = of_transformers(folder, token_ids[:-1])
    weights = {name.removeprefix("midlayer."): tensor for name, tensor in load_file(head / "model.safetensors").items()}
    joined = torch.cat([result.hidden_states[number][0] for number in (1, 2, 3)], -1)

    def step(ids: Any, features: Any) -> tuple[Any, Any]:
        feature = normed(features, weights["hidden_norm.weight"])
        inputs = torch.cat([normed(model.model.embed_tokens(ids), weights["input_layernorm.weight"]), feature], -1)
        query, key, value = (
            (inputs @ weights[f"self_attn.{name}_proj.weight"].T).view(len(ids), 4, 16).transpose(0, 1)
            for name in "qkv"
        )
        scores = rotated(query) @ rotated(key).transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(ids), SIZE)
        states = attended @ weights["self_attn.o_proj.weight"].T + (feature if keeps_norm else features)
        inner = normed(states, weights["post_attention_layernorm.weight"])
        gate, up = (inner @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        state = (states + (torch.nn.functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T)[-1]
        column = (normed(state, weights["norm.weight"]) @ weights["lm_head.weight"].T).argmax()
        return state, column + weights["d2t"][column]

    # The last layer's states are normed in what transformers returns; without its norm they are those of the layer.
    assert len(model.model.layers) == 3
    joined = torch.cat([joined[:, : 2 * SIZE], last_states(model, token_ids[:-1])], -1)
    return chained(token_ids, joined @ weights["fc.weight"].T, step)


def last_states(model: Any, token_ids: NDArray[np.int32]) -> Any:
    """States after the last layer, before the output norm."""
    norm, model.model.norm = model.model.norm, torch.nn.Identity()
    with torch.no_grad():
        states = model.model(torch.from_numpy(token_ids.astype(np.int64))[None]).last_hidden_state[0]
    model.model.norm = norm
    return states


def mtp_by_hand(folder: Path, kind: str, token_ids: NDArray[np.int32], tmp_path: Path) -> list[int]:
    """The MTP layer as a layer of transformers' own model, which then has one layer more."""
    whole, weights = with_mtp_as_layer(folder, kind, tmp_path / "whole")
    _, result = of_transformers(folder, token_ids[:-1])
    model, _ = of_transformers(whole, token_ids[:1])
    embedding, output = model.model.embed_tokens, model.lm_head
    model.model.layers, model.model.norm = model.model.layers[3:], torch.nn.Identity()
    if kind in QWEN_KINDS:
        model.config.layer_types = ["full_attention"]

    def step(ids: Any, features: Any) -> tuple[Any, Any]:
        parts = normed(embedding(ids), weights["enorm.weight"]), normed(features, weights["hnorm.weight"])
        inputs = torch.cat(parts, -1) @ weights["eh_proj.weight"].T
        state = model.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1]
        last = normed(state, weights["shared_head.norm.weight"])
        return last if kind in QWEN_KINDS else state, output(last).argmax()

    return chained(token_ids, result.last_hidden_state[0], step)


@pytest.mark.parametrize("keeps_norm", [False, True])
def test_eagle3_drafts_are_those_of_its_formulas(
    headed_model: Callable[..., Path],
    eagle3: Callable[..., Path],
    open_model: Callable[..., Any],
    token_ids: NDArray[np.int32],
    keeps_norm: bool,
) -> None:
    folder, head = headed_model("llama"), eagle3(norm_before_residual=keeps_norm)

    expected = eagle3_by_hand(folder, head, token_ids, keeps_norm=keeps_norm)
    assert drafted(open_model(folder), head, token_ids) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_mtp_drafts_are_those_of_the_models_next_layer(
    headed_model: Callable[..., Path],
    open_model: Callable[..., Any],
    token_ids: NDArray[np.int32],
    tmp_path: Path,
    kind: str,
) -> None:
    folder = headed_model(kind)

    expected = mtp_by_hand(folder, kind, token_ids, tmp_path)
    assert drafted(open_model(folder), None, token_ids) == expected
    assert len(set(expected)) > 1


# -- refusals ----------------------------------------------------------------------------------------


@pytest.fixture
def refused(
    headed_model: Callable[..., Path], eagle3: Callable[..., Path], open_on_cpu: Callable[..., Any], tmp_path: Path
) -> Callable[..., str]:
    """A function from changes of a head's settings and tensors to the message with which it is refused."""
    import shutil

    from safetensors.torch import load_file

    def open_changed(tensors: dict[str, Any], **settings: Any) -> str:
        folder = tmp_path / "changed"
        shutil.copytree(eagle3(), folder)
        change(folder, **settings)
        changed = load_file(folder / "model.safetensors") | tensors
        save({name: tensor for name, tensor in changed.items() if tensor is not None}, folder)
        runner = open_on_cpu(headed_model("llama"))
        with pytest.raises(ModelLoadError) as caught:
            runner.open_head(ModelSource("head", folder), max_tokens=1, min_probability=0.0)
        assert str(folder) in caught.value.message
        return caught.value.message

    return open_changed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "its architectures are LlamaForCausalLM; hf reads EAGLE-3 heads"),
        ({"num_hidden_layers": 2}, "its num_hidden_layers is 2"),
        ({"vocab_size": 32000}, "its vocab_size 32000 is not that of the model, 400"),
        ({"draft_vocab_size": 32}, "its draft_vocab_size 32 does not fit its tensor d2t"),
        ({"hidden_size": 128}, "its hidden_size 128 is not that of the model, 64"),
        ({"intermediate_size": 48}, "mlp.down_proj.weight is [64, 96], but for this model it must be [64, 48]"),
        ({"attention_bias": True}, "lacks tensors: self_attn.k_proj.bias, self_attn.o_proj.bias"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "move eagle_aux_hidden_state_layer_ids into eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 1]}}, "it reads the layers [0, 3, 1]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "three are needed"),
        ({"eagle_config": None}, "it reads the layers [1, 0, -1]"),
    ],
)
def test_a_head_of_another_model_is_refused(refused: Callable[..., str], settings: Any, message: str) -> None:
    assert message in refused({}, **settings)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"midlayer.hidden_norm.weight": None}, "lacks tensors: hidden_norm.weight"),
        ({"fc.bias": torch.zeros(SIZE)}, "has unknown tensors: fc.bias"),
        ({"fc.weight": torch.zeros(SIZE, 2 * SIZE)}, "fc.weight is [64, 128], but for this model it must be [64, 192]"),
        ({"d2t": torch.arange(150) + 200}, "its tensor d2t names tokens beyond the 400 of the model"),
        ({"d2t": None}, "its draft_vocab_size 150 does not fit its tensor d2t"),
    ],
)
def test_a_head_with_other_tensors_is_refused(refused: Callable[..., str], tensors: Any, message: str) -> None:
    assert message in refused(tensors)


def test_a_head_may_have_embeddings_of_its_own(
    headed_model: Callable[..., Path],
    eagle3: Callable[..., Path],
    open_on_cpu: Callable[..., Any],
    token_ids: NDArray[np.int32],
    tmp_path: Path,
) -> None:
    """Those of the model give the same drafts, others give others."""
    import shutil

    from safetensors.torch import load_file

    folder, head = headed_model("llama"), eagle3()
    own = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    found = []
    for name, embeddings in (("same", own), ("other", own.flip(0))):
        shutil.copytree(head, tmp_path / name)
        save(load_file(head / "model.safetensors") | {"embed_tokens.weight": embeddings}, tmp_path / name)
        found.append(drafted(open_on_cpu(folder), tmp_path / name, token_ids))

    assert found[0] == drafted(open_on_cpu(folder), head, token_ids) != found[1]


def test_a_folder_without_weights_is_refused(
    headed_model: Callable[..., Path], open_on_cpu: Callable[..., Any], tmp_path: Path
) -> None:
    runner = open_on_cpu(headed_model("llama"))

    with pytest.raises(ModelLoadError, match="a draft head is a folder with"):
        runner.open_head(ModelSource("head", tmp_path), max_tokens=1, min_probability=0.0)


def test_a_model_without_an_mtp_layer_needs_a_source(
    headed_model: Callable[..., Path], open_on_cpu: Callable[..., Any]
) -> None:
    runner = open_on_cpu(headed_model("llama"))

    with pytest.raises(ModelLoadError, match=r"hold no layer for multi-token prediction .*set 'source'"):
        runner.open_head(None, max_tokens=1, min_probability=0.0)


@pytest.mark.parametrize("is_other", [False, True])
def test_an_mtp_layer_beside_a_quantised_projection_to_logits(
    headed_model: Callable[..., Path], is_other: bool
) -> None:
    """Files of DeepSeek and GLM repeat the model's projection, or have another: the layer uses what they have."""
    from transformers import AutoModelForCausalLM

    from enginehouse_hf.heads.mtp import open_mtp
    from enginehouse_hf.packed import PackedLinear, quantized_head

    folder, states = headed_model("glm4_moe"), torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = open_mtp(folder, model).logits(states)
        weight = model.get_output_embeddings().weight
        model.set_output_embeddings(PackedLinear(quantized_head(weight.flip(0) if is_other else weight)))
        found = open_mtp(folder, model).logits(states)

    assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))


def test_mtp_tensors_are_checked(
    headed_model: Callable[..., Path], open_on_cpu: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file

    shutil.copytree(headed_model("glm4_moe"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    prefix = "model.layers.3."
    for name, changed, message in (
        ("self_attn.q_proj.weight", None, "lacks tensors: self_attn.q_proj.weight"),
        ("eh_proj.weight", torch.zeros(SIZE, SIZE), r"eh_proj.weight is \[64, 64\], .* must be \[64, 128\]"),
        ("embed_tokens.weight", torch.zeros(8, SIZE), r"embed_tokens is \[8, 64\]"),
    ):
        some = {**tensors, prefix + name: changed}
        save({name: tensor for name, tensor in some.items() if tensor is not None}, tmp_path / "model")
        with pytest.raises(ModelLoadError, match=message):
            open_on_cpu(tmp_path / "model").open_head(None, max_tokens=1, min_probability=0.0)
