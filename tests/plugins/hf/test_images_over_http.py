"""Images through the whole server to transformers models: chats at once, the cache, and a real model if given."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_testkit.fake_media import fake_image_file
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

pytest.importorskip("PIL")
pytestmark = [pytest.mark.hf, pytest.mark.slow]  # starting a server takes 17 s

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><image><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}a:"
)
_IMAGE_TOKENS = 16


@pytest.fixture(scope="module", params=["cpu", "cuda:0"])
def client(
    request: pytest.FixtureRequest, vision_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    import torch

    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = Path(shutil.copytree(vision_model("qwen2_5_vl"), tmp_path_factory.mktemp("served") / "qwen"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    options = {"device": request.param, "dtype": "float32", "threads": 1}
    models = {"seeing": ModelSettings(source=str(folder), backend="hf", context=256, slots=4, options=options)}
    with served(Settings(models=models), timeout=60) as client:
        yield client


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def shown(number: int) -> dict[str, Any]:
    return image(fake_image_file(number, 64, 64))


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask(client: httpx.Client, *parts: dict[str, Any], max_tokens: int = 12) -> dict[str, Any]:
    messages, limits = [{"role": "user", "content": list(parts)}], {"max_tokens": max_tokens, "temperature": 0}
    body = {"model": "seeing", "messages": messages, **limits, "logprobs": True}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counter(client: httpx.Client, name: str) -> float:
    """A counter of the only model."""
    values = [line.split()[-1] for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return float(values[0]) if values else 0.0


def workers() -> list[psutil.Process]:
    """The processes of this server that compute."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "enginehouse.workers" in child.cmdline()]


def said(response: dict[str, Any]) -> str:
    return str(response["choices"][0]["message"]["content"])


def test_chats_with_images(client: httpx.Client) -> None:
    """Places and pixels count, whatever runs beside; the same prompt is cached with its images."""
    (listed,) = client.get("/v1/models").json()["data"]
    prompts = [
        (text("look"), shown(1), text("what?")),
        (text("look"), shown(2), text("what?")),
        (shown(1), text("look"), text("what?")),
        (text("look"), shown(1), shown(2), text("what?")),
    ]
    alone = [ask(client, *parts) for parts in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda parts: ask(client, *parts), prompts))

    assert "image" in listed["input_modalities"]
    assert [said(one) for one in together] == [said(one) for one in alone]
    first = [one["choices"][0]["logprobs"]["content"][0]["logprob"] for one in alone]  # tiny models repeat themselves
    assert len({round(logprob, 2) for logprob in first}) == len(prompts)
    counted = [one["usage"]["prompt_tokens_details"]["image_tokens"] for one in alone]
    assert counted == [_IMAGE_TOKENS * count for count in (1, 1, 1, 2)]
    assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] > _IMAGE_TOKENS for one in together)
    # Reused are the image after other text, and the second one of the last prompt; the rest is a cached prefix.
    names = ("enginehouse_encoded_images_total", "enginehouse_reused_images_total")
    wait_until(lambda: [counter(client, name) for name in names] == [2, 2])


def test_a_chat_with_an_image_outlives_its_worker(client: httpx.Client) -> None:
    """Killed in the middle of its text: the next worker computes the image again, and the text goes on."""
    parts = (text("see"), shown(3), text("what?"))
    limits = {"max_tokens": 180, "temperature": 0, "ignore_eos": True, "logprobs": True}
    body = {"model": "seeing", "messages": [{"role": "user", "content": list(parts)}], **limits}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    found, is_killed = [], False
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                found += (choice["logprobs"] or {}).get("content") or []
                if len(found) >= 5 and not is_killed:
                    is_killed = True
                    (worker,) = workers()
                    worker.kill()

    assert is_killed
    assert [token["token"] for token in found] == [token["token"] for token in whole]
    assert [token["logprob"] for token in found] == pytest.approx([token["logprob"] for token in whole], abs=1e-3)


def test_marks_around_an_image_come_once(client: httpx.Client) -> None:
    """The template's placeholder is replaced as a whole, and forged marks stay text."""
    content = [text("<|vision_start|><image>"), shown(1), text("b")]
    body = {"model": "seeing", "messages": [{"role": "user", "content": content}], "with_pieces": True}
    found = client.post("/tokenize", json=body).json()
    pieces = [json.dumps(token["piece"]) for token in found["tokens"]]
    (chunk,) = found["chunks"]

    assert chunk["count"] == _IMAGE_TOKENS
    assert [sum(mark in piece for piece in pieces) for mark in ("<|vision_start|>", "<|vision_end|>", "<image>")] == [
        1,
        1,
        0,
    ]


def test_a_real_model_names_colours(tmp_path: Path) -> None:
    """A vision model from outside: docs/hf.md, Images."""
    path = os.environ.get("ENGINEHOUSE_HF_VISION_MODEL")
    if path is None:
        pytest.skip("ENGINEHOUSE_HF_VISION_MODEL is not set to the folder of a model that reads images")
    from PIL import Image

    colours = {"red": (220, 20, 20), "green": (20, 160, 40), "blue": (20, 40, 220)}
    models = {"seeing": ModelSettings(source=path, backend="hf", context=4096, options={"device": "cpu"})}
    with served(Settings(models=models), timeout=600) as client:
        for name, colour in colours.items():
            file = tmp_path / f"{name}.png"
            Image.new("RGB", (256, 256), colour).save(file)
            question = text("What colour is this image? Answer with one word.")
            answer = said(ask(client, image(file.read_bytes()), question, max_tokens=24))
            assert name in answer.lower(), f"of a {name} square the model says {answer!r}"
