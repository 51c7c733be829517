"""A hub with some models, and an empty place for downloads."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from enginehouse_testkit.stand_in_hub import Repository, StandIn, stand_in

WEIGHTS = random.Random(1).randbytes(3_000_000)
SAFETENSORS = {
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "README.md": b"# A model\n",
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "modeling_own.py": b"print('code')\n",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle" * 1000,
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": WEIGHTS[::-1],
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "original/consolidated.00.pth": b"pickle",
}
GGUF = {
    "README.md": b"# Quantised\n",
    "m-Q4_K_M.gguf": WEIGHTS[:1_000_000],
    "m-Q8_0.gguf": WEIGHTS[:2_000_000],
    "mmproj-m-F16.gguf": b"projector",
    "F16/m-F16-00001-of-00002.gguf": WEIGHTS[:700_000],
    "F16/m-F16-00002-of-00002.gguf": WEIGHTS[700_000:1_300_000],
}


@pytest.fixture
def hub() -> Iterator[StandIn]:
    """A hub with a model as safetensors, one as GGUF files, a gated and a private one, and one of pickles."""
    models = {
        "owner__plain": Repository({"main": SAFETENSORS, "v1.0": {**SAFETENSORS, "model.safetensors": b"first"}}),
        "owner__packed": Repository({"main": GGUF}),
        "owner__gated": Repository({"main": SAFETENSORS}, gated=True),
        "owner__private": Repository({"main": SAFETENSORS}, private=True),
        "owner__pickles": Repository({"main": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}),
    }
    with stand_in(**models) as running:
        yield running


@pytest.fixture(autouse=True)
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where downloads go; no token, no other hub."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("no_proxy", "*")
    # The library reads the environment once; these are for this process.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hf" / "hub"
