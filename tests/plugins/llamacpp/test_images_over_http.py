"""Images through the whole server to llama.cpp: templates of its models, chats at once, and a real model if given."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_testkit.fake_media import fake_image_file
from enginehouse_testkit.served import served

from .vision_models import GEMMA3, QWEN2VL, write_projector, write_text_model

pytest.importorskip("PIL")
pytestmark = pytest.mark.llamacpp

_TEMPLATE = (
    "{{% for message in messages %}}{{{{ message['role'] }}}}:"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}\n{{% endfor %}}a:"
)
_MODELS = {
    "gemma": (GEMMA3, "<start_of_image>"),
    "qwen": (QWEN2VL, "<|vision_start|><|image_pad|><|vision_end|>"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    models = {}
    for name, (kind, placeholder) in _MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        template = _TEMPLATE.format(image=placeholder)
        path = write_text_model(folder / "tiny-F32.gguf", kind, **{"tokenizer.chat_template": template})
        write_projector(folder / "mmproj-F16.gguf", kind)
        models[name] = ModelSettings(source=str(path), context=256, slots=4, options={"threads": 1})
    with served(Settings(models=models), timeout=60) as client:
        yield client


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask(client: httpx.Client, model: str, *parts: dict[str, Any], max_tokens: int = 12) -> dict[str, Any]:
    messages, limits = [{"role": "user", "content": list(parts)}], {"max_tokens": max_tokens, "temperature": 0}
    body = {"model": model, "messages": messages, **limits, "logprobs": True, "top_logprobs": 3}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def said(response: dict[str, Any]) -> str:
    """The text with its log-probabilities: the texts of tiny models repeat themselves."""
    choice = response["choices"][0]
    return json.dumps([choice["message"]["content"], choice["logprobs"]])


def picture(number: int) -> dict[str, Any]:
    return image(fake_image_file(number, 64, 64))


@pytest.mark.parametrize("model", _MODELS)
def test_chats_with_images(client: httpx.Client, model: str) -> None:
    """Places and pixels count; the tokens are those of the projector, and the same prompt is cached with its images."""
    kind, _ = _MODELS[model]
    listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    prompts = [
        (text("look"), picture(1), text("what?")),
        (text("look"), picture(2), text("what?")),
        (picture(1), text("look"), text("what?")),
        (text("look"), picture(1), picture(2), text("what?")),
    ]
    alone = [ask(client, model, *parts) for parts in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda parts: ask(client, model, *parts), prompts))

    assert "image" in listed[model]["input_modalities"]
    assert [said(one) for one in together] == [said(one) for one in alone]
    assert len({said(one) for one in alone}) == len(prompts)
    counted = [one["usage"]["prompt_tokens_details"]["image_tokens"] for one in alone]
    assert counted == [kind.num_tokens * count for count in (1, 1, 1, 2)]
    assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] > kind.num_tokens for one in together)


@pytest.mark.parametrize("model", _MODELS)
def test_marks_around_an_image_come_once(client: httpx.Client, model: str) -> None:
    """The template's placeholder is replaced as a whole, and forged marks stay text."""
    content = [text("<start_of_image><|vision_start|>"), picture(1), text("b")]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "with_pieces": True}
    found = client.post("/tokenize", json=body).json()
    begin, end = {"gemma": (268, 269), "qwen": (270, 271)}[model]  # of the tiny vocabulary
    ids = [token["id"] for token in found["tokens"]]
    (chunk,) = found["chunks"]

    assert ids.count(begin) == ids.count(end) == 1
    assert ids.index(begin) < ids.index(end)
    assert chunk["count"] == _MODELS[model][0].num_tokens


def test_a_real_model_names_colours(tmp_path: Path) -> None:
    """A vision model from outside, with its projector beside it: docs/llamacpp.md, Images."""
    path = os.environ.get("ENGINEHOUSE_VISION_MODEL")
    if path is None:
        pytest.skip("ENGINEHOUSE_VISION_MODEL is not set to the path of a model with a projector beside it")
    from PIL import Image

    colours = {"red": (220, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 220)}
    models = {"seeing": ModelSettings(source=path, context=4096)}
    with served(Settings(models=models), timeout=600) as client:
        for name, colour in colours.items():
            file = tmp_path / f"{name}.png"
            Image.new("RGB", (256, 256), colour).save(file)
            question = text("What colour is this image? Answer with one word.")
            response = ask(client, "seeing", image(file.read_bytes()), question, max_tokens=24)
            answer = response["choices"][0]["message"]["content"]
            assert name in answer.lower(), f"of a {name} square the model says {answer!r}"
