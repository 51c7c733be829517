"""The gaps of a text stream while images are encoded, on llama.cpp and hf, with encoders of a real size.

The models are SmolLM2-135M with a SigLIP-B/16 encoder of random weights (86 million, 224 x 224 pixels, 196 tokens): how
long it takes does not depend on them. One stream goes on; after 40 tokens images follow each other, each another one,
so that every one is encoded. One thread, and processor time of the model's process instead of seconds: threads that
wait for each other on a busy machine would make seconds of milliseconds.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from attrs import frozen
from rich.console import Console

from enginehouse_testkit.fake_media import fake_image_file
from enginehouse_testkit.gguf_writer import write_gguf

from .cuda_models import SHAPES, write_shape
from .peers import RunningPeer, running
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_images", "write_hf_folder"]

_SIDE, _PATCH, _WIDTH, _INNER, _LAYERS, _HEADS = 224, 16, 768, 3072, 12, 12
_TEXT_WIDTH = SHAPES["smollm2-135m"]["hidden_size"]
_NUM_IMAGES = 4
_TOKENS_BEFORE = 40
_ALONE, _BESIDE = "alone", "beside images"
_STEP, _ANSWER, _GAP = "text, mean gap, ms of CPU", "image, ms of CPU", "text, longest gap, ms of CPU"

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


@frozen
class _Seeing:
    """A server with one model that reads images."""

    name: str
    source: Path
    ready_path: str = "/health"

    def command(self, port: int, folder: Path) -> list[str]:
        template, config = folder / "images.jinja", folder / f"{self.name}.toml"
        template.write_text(_TEMPLATE)
        lines = [f'source = "{self.source}"', f'backend = "{self.name}"', "context = 2048", "slots = 4", "threads = 1"]
        lines += [f'chat_template = "{template}"']
        if self.name == "hf":
            lines += ['device = "cpu"', "random_weights = true"]
        config.write_text("\n".join(["[models.seeing]", *lines, ""]))
        return [sys.executable, "-m", "enginehouse", "serve", "--config", str(config), "--port", str(port)]


def write_hf_folder(folder: Path, shape: str = "smollm2-135m") -> Path:
    """Write the files of a LLaVA model of a text model's shape, without weights."""
    write_shape(shape, folder)
    text = json.loads((folder / "config.json").read_text())
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "vision_use_head": False,
    }
    config = {"model_type": "llava", "text_config": text, "vision_config": tower, "image_token_index": 3}
    config |= {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"image_processor_type": "SiglipImageProcessor", "size": {"height": _SIDE, "width": _SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**size, **half}))
    return folder


def _gguf_file(model: Path, folder: Path) -> Path:
    """A link to the text model with a projector beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    linked = folder / "seeing-Q4_1.gguf"
    linked.unlink(missing_ok=True)
    linked.symlink_to(model)
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def vector(size: int, number: float = 0.0) -> np.ndarray:
        return np.full(size, number, np.float32)

    num_patches = (_SIDE // _PATCH) ** 2
    tensors = {"v.patch_embd.weight": matrix(_WIDTH, 3, _PATCH, _PATCH), "v.patch_embd.bias": vector(_WIDTH)}
    tensors["v.position_embd.weight"] = matrix(num_patches, _WIDTH)
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (_WIDTH, _WIDTH))
    shapes |= {"ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            tensors[f"v.blk.{layer}.{name}.weight"] = matrix(*shape)
            tensors[f"v.blk.{layer}.{name}.bias"] = vector(shape[0])
        for name in ("ln1", "ln2"):
            tensors[f"v.blk.{layer}.{name}.weight"] = vector(_WIDTH, 1.0)
            tensors[f"v.blk.{layer}.{name}.bias"] = vector(_WIDTH)
    tensors |= {"v.post_ln.weight": vector(_WIDTH, 1.0), "v.post_ln.bias": vector(_WIDTH)}
    tensors |= {"mm.0.weight": matrix(_WIDTH, _WIDTH), "mm.0.bias": vector(_WIDTH)}
    tensors |= {"mm.2.weight": matrix(_TEXT_WIDTH, _WIDTH), "mm.2.bias": vector(_TEXT_WIDTH)}
    sizes = {
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "block_count": _LAYERS,
        "projection_dim": _TEXT_WIDTH,
        "attention.head_count": _HEADS,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    values = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.use_gelu": True,
        **{f"clip.vision.{key}": item for key, item in sizes.items()},
    }
    halved = {name: "f16" for name, tensor in tensors.items() if tensor.ndim > 1 and "position" not in name}
    write_gguf(folder / "mmproj-F16.gguf", values, tensors, halved)
    return linked


def _body(content: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    # The same token every time: random ones are not always whole characters, which a stream would hold back.
    body = {"model": "seeing", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "logit_bias": {"100": 100}, **more}


class _Spent:
    """Milliseconds of processor time that the model's process has used so far."""

    def __init__(self, server: RunningPeer) -> None:
        children = psutil.Process(server.process_id).children(recursive=True)
        (self._worker,) = (child.pid for child in children if "enginehouse.workers" in child.cmdline())

    def __call__(self) -> float:
        spent_ns = 0
        for thread in Path(f"/proc/{self._worker}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread may end while we look
                spent_ns += int((thread / "schedstat").read_text().split()[0])
        return spent_ns / 1e6


def _ask(client: httpx.Client, number: int) -> None:
    """Ask for one token about an image that was not sent before."""
    data = base64.b64encode(fake_image_file(number, _SIDE, _SIDE)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    response = client.post("/v1/chat/completions", json=_body([image, {"type": "text", "text": "What?"}], 1))
    response.raise_for_status()
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == (_SIDE // _PATCH) ** 2


def _stream_beside(client: httpx.Client, server: RunningPeer, first: int) -> tuple[float, float]:
    """Return the mean gap of a stream before images are sent, and the longest one while they are computed, in ms."""
    finished, before, during, spent_ms = threading.Event(), list[float](), list[float](), _Spent(server)

    def send() -> None:
        try:
            with httpx.Client(base_url=server.url, timeout=600, trust_env=False) as other:
                for number in range(_NUM_IMAGES):
                    _ask(other, first + number)
        finally:
            finished.set()

    sender = threading.Thread(target=send)
    with client.stream("POST", "/v1/chat/completions", json=_body("Tell me.", 1500, stream=True)) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (during if sender.ident else before).append(spent_ms())
            if len(before) == _TOKENS_BEFORE and not sender.ident:
                during.append(before[-1])
                sender.start()
            if finished.is_set():
                break
    sender.join()
    return float(np.diff(before[5:]).mean()), float(np.diff(during).max())


def measure_images(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """The longest gap of a stream beside images, over a request with an image alone."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    sources = {"hf": write_hf_folder(plan.folder / "seeing-hf")}
    sources["llamacpp"] = _gguf_file(plan.model_file, plan.folder / "seeing-llamacpp")
    record, number = Record(), 1
    for round_number, name in plan.interleave(sorted(sources)):
        with (
            running(_Seeing(name, sources[name]), plan.folder / "logs") as server,
            httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client,
        ):
            _ask(client, 0)
            spent_ms = _Spent(server)
            began_ms = spent_ms()
            for place in range(_NUM_IMAGES):
                _ask(client, number + place)
            alone_ms = (spent_ms() - began_ms) / _NUM_IMAGES
            step_ms, gap_ms = _stream_beside(client, server, number + _NUM_IMAGES)
            number += 2 * _NUM_IMAGES
        record.add(Key(_ALONE, name, _STEP), step_ms)
        record.add(Key(_ALONE, name, _ANSWER), alone_ms)
        record.add(Key(_BESIDE, name, _GAP), gap_ms)
        console.print(f"round {round_number + 1}/{plan.num_rounds}: {name}")
    return record, [
        Comparison(Key(_BESIDE, name, _GAP), Key(_ALONE, name, _ANSWER), target=1.0, target_is_upper=True)
        for name in sorted(sources)
    ]
