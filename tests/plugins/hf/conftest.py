"""Tiny models of many architectures, made by transformers. Nothing here is collected without the ``hf`` extra."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that logits lie apart and mistakes show
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 16}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MAMBA2: dict[str, Any] = {"mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32}
_GEMMA: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 16},
    "mistral": {**_SIZES, "head_dim": 16, "sliding_window": 8},
    "gemma3_text": _GEMMA,
    "phi": {**_SIZES, "partial_rotary_factor": 0.5},
    "phi3": {**_SIZES, "sliding_window": 8, "pad_token_id": 0},
    "mixtral": {**_SIZES, **_EXPERTS, "num_local_experts": 4, "sliding_window": 8},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
    "qwen2_moe": {
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "olmo2": _SIZES,
    "olmo3": {**_SIZES, "sliding_window": 8},
    "olmoe": {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "granite": {
        **_SIZES,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "granite_swa": {**_SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "exaone4": {**_SIZES, "sliding_window": 8, "sliding_window_pattern": 2},
    "ernie4_5": {**_SIZES, "head_dim": 16},
    "gemma3": {  # the model that also reads images
        "text_config": _GEMMA,
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "glm4": {**_SIZES, "head_dim": 16, "pad_token_id": 0},
    "smollm3": {**_SIZES, "pad_token_id": 0, "no_rope_layer_interval": 2},
    "gpt_neox": {**_SIZES, "num_key_value_heads": None},
    "gpt_oss": {**_SIZES, **_EXPERTS, "num_local_experts": 4, "sliding_window": 8},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "qwen3_next": {
        **_SIZES,
        **_DELTA,
        **_EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_SIZES, **_DELTA, "head_dim": 16},
    "qwen3_5": {  # the model that also reads images
        "text_config": {**_SIZES, **_DELTA, "head_dim": 16},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    },
    "bamba": {**_SIZES, **_MAMBA2, "mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_SIZES,
        **_MAMBA2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        **_SIZES,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba2": {
        **_SIZES,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 32,
        "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "adapter_rank": 4,
    },
    "falcon_h1": {**_SIZES, **_MAMBA2, "head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "lfm2": {
        **_SIZES,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "minimax": {
        **_SIZES,
        **_EXPERTS,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2_moe": {
        **_SIZES,
        **_EXPERTS,
        "num_experts": 4,
        "num_dense_layers": 1,
        "moe_intermediate_size": 48,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "jamba": {
        **_SIZES,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "olmo_hybrid": {
        **_SIZES,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}


_FUSED = (
    "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmo2", "olmo3",
    "olmoe", "granite", "granite_swa", "glm4", "smollm3", "exaone4", "ernie4_5", "gemma3", "gpt_oss",
)  # fmt: skip


@pytest.fixture(params=_FUSED)
def fused_family(request: pytest.FixtureRequest) -> str:
    """The model type of each family that consists of known parts."""
    name: str = request.param
    return name


_GPU = {"device": "cuda:0", "cache_tokens": 2048}
_WAYS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "cuda": _GPU,
    "cuda-eager": {**_GPU, "cuda_graphs": False},
    "cuda-unfused": {**_GPU, "fused": False},
}


@pytest.fixture(scope="session", params=_WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of each way in which the plugin runs a model."""
    import torch

    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return _WAYS[request.param]


@pytest.fixture
def open_family(random_model: Callable[[str], Path], way: dict[str, Any]) -> Callable[[str], Any]:
    """A function from a model type to a runner of a tiny model of it, run in one of the ways."""
    from enginehouse.contract.backend import ModelSource
    from enginehouse_hf.backend import HfBackend, HfOptions

    def open_one(family: str) -> Any:
        path = random_model(family)
        settings = HfOptions(dtype="float32", threads=1, slots=4, context=128, **way)
        return HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)

    return open_one


@pytest.fixture(scope="session")
def random_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a model type of transformers to a folder with a tiny random model of it."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = _write_model(name, tiny_model("llama"), tmp_path_factory.mktemp(name) / name)
        return folders[name]

    return make


def _write_model(name: str, tokenizer: Path, folder: Path) -> Path:
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes: dict[str, Any] = {key: value for key, value in _CONFIGS[name].items() if value is not None}
    vocab = {"vocab_size": len(AutoTokenizer.from_pretrained(tokenizer))}
    sizes |= {"text_config": sizes["text_config"] | vocab} if "text_config" in sizes else vocab
    config = AutoConfig.for_model(name, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which are ones and zeros
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


_VISION_TEXT: dict[str, Any] = {**_SIZES, "num_hidden_layers": 2}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_MARKS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>")
_MARKS += ("<|vision_start|>", "<|vision_end|>")  # <global-img> and the second row are ordinary text, as in Idefics3
_VISION: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "idefics3": (
        {"text_config": {**_VISION_TEXT, "model_type": "llama"}, "vision_config": _TOWER, "scale_factor": 2},
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    ),
    "smolvlm": (
        {"text_config": {**_VISION_TEXT, "model_type": "llama"}, "vision_config": _TOWER, "scale_factor": 2},
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    ),
    "llava": (
        {
            "text_config": {**_VISION_TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": 24},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    ),
    "gemma3": (
        {
            "text_config": {**_GEMMA, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _TOWER,
            "mm_tokens_per_image": 16,
        },
        "Gemma3ImageProcessorPil",
        {"size": {"height": 32, "width": 32}},
    ),
    "qwen2_5_vl": (
        {
            "text_config": {
                **_VISION_TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 8,
                "window_size": 32,
                "fullatt_block_indexes": [1],
            },
        },
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 8},
    ),
}
"""Configuration, class of the image processor, and its settings, of each family of models that read images."""


@pytest.fixture(scope="session")
def vision_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a model type to a folder with a tiny random model of it that reads images."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = _write_vision_model(name, tiny_model("llama"), tmp_path_factory.mktemp(name) / name)
        return folders[name]

    return make


def _write_vision_model(name: str, tokenizer: Path, folder: Path) -> Path:
    import torch
    import transformers

    settings, processor, sizes = _VISION[name]
    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    words.add_tokens(list(_MARKS), special_tokens=True)
    words.save_pretrained(folder)
    ids = dict(zip(_MARKS, words.convert_tokens_to_ids(list(_MARKS)), strict=True))
    start, end = ids["<|vision_start|>"], ids["<|vision_end|>"]
    marks = {"image_token_id": ids["<image>"], "boi_token_index": start, "eoi_token_index": end}
    marks |= {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_index": ids["<image>"]}
    settings = {**settings, "text_config": {**settings["text_config"], "vocab_size": len(words), "pad_token_id": 0}}
    config = transformers.AutoConfig.for_model(name, **settings, **marks)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        else:
            parameter.data = torch.randn_like(parameter) / parameter[0].numel() ** 0.5
    model.save_pretrained(folder)
    getattr(transformers, processor)(**sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def generate() -> Callable[[Path, list[list[int]], int], list[list[int]]]:
    """What transformers itself generates in float32, prompt by prompt, with its own attention and caches."""
    return _generate


def _generate(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers
