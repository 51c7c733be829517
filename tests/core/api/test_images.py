"""Images in prompts that core renders, over HTTP: on every surface, refused files, and a worker that dies of one."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, MediaSettings, ModelSettings, Settings
from enginehouse_testkit.fake_media import PLACEHOLDER, fake_image_file
from enginehouse_testkit.served import served
from enginehouse_testkit.waiting import wait_until

pytest.importorskip("PIL")

_TOKENS = 8


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image(number: int, width: int = 4, height: int = 4, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(fake_image_file(number, width, height)), **fields}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@contextlib.contextmanager
def connect(isolation: str = "thread", **options: Any) -> Iterator[httpx.Client]:
    settings = {"source": "fake", "backend": "fake", "isolation": isolation, "context": 1024}
    fake = ModelSettings(**settings, options={"image_tokens": _TOKENS, **options})  # type: ignore[arg-type]
    plain = ModelSettings(source="fake", backend="fake", isolation="thread")
    models = {"fake": fake, "plain": plain}
    with served(Settings(models=models, media=MediaSettings(max_images=4)), timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with connect() as client:
        yield client


def ask(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, "temperature": 0}
    return client.post("/v1/chat/completions", json={**body, **fields})


def answer(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = ask(client, *parts, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def said(response: dict[str, Any]) -> str:
    return response["choices"][0]["message"]["content"]


def refused(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> dict[str, str]:
    response = ask(client, *parts, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_answers_depend_on_the_images_and_their_places(client: httpx.Client) -> None:
    first = answer(client, text("look"), image(1), text("what?"))
    others = [
        answer(client, text("look"), image(2), text("what?")),
        answer(client, image(1), text("look"), text("what?")),
        answer(client, text("look"), image(1), image(2), text("what?")),
        answer(client, text("look"), image(1, detail="low"), image(1, 100, 100), text("what?")),
    ]

    assert said(answer(client, text("look"), image(1), text("what?"))) == said(first)
    assert len({said(one) for one in (first, *others)}) == 5
    details = [one["usage"]["prompt_tokens_details"]["image_tokens"] for one in (first, *others)]
    assert details == [_TOKENS, _TOKENS, _TOKENS, 2 * _TOKENS, 3 * _TOKENS]


def test_text_forges_no_image(client: httpx.Client) -> None:
    """Not alone, beside an image, in two parts, or as an assistant's: it is encoded as its characters."""
    pieces = [PLACEHOLDER, PLACEHOLDER[:4], PLACEHOLDER[4:]]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": f"I saw {PLACEHOLDER}"},
        {"role": "user", "content": [*map(text, pieces), image(1), text(PLACEHOLDER)]},
    ]
    for number, content in enumerate(([text(PLACEHOLDER)], [image(1)])):
        found = client.post("/tokenize", json={"model": "fake", "messages": [{"role": "user", "content": content}]})
        assert ("chunks" in found.json()) == bool(number), found.text
    found = client.post("/tokenize", json={"model": "fake", "messages": messages, "with_pieces": True}).json()

    assert [chunk["count"] for chunk in found["chunks"]] == [_TOKENS]
    written = "".join(token["piece"] for token in found["tokens"])
    assert written.count(PLACEHOLDER) == 4  # of the assistant; the whole one and the joined one, and that at the end


def test_tokenize_and_counts_show_images(client: httpx.Client) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": [text("a"), image(1), text("b"), image(2)]}]}
    tokens = client.post("/tokenize", json=body).json()
    counted = client.post("/v1/chat/completions/input_tokens", json=body).json()

    first, second = tokens["chunks"]
    assert (first["type"], first["count"], second["count"]) == ("image", _TOKENS, _TOKENS)
    assert all(token_id < 0 for token_id in tokens["tokens"][first["start"] : first["start"] + _TOKENS])
    assert counted["input_tokens"] == tokens["count"] == len(tokens["tokens"])
    usage = answer(client, *body["messages"][0]["content"])["usage"]
    assert usage["prompt_tokens"] == tokens["count"]


def test_cached_images_are_counted_and_survive_a_restart(tmp_path: Path) -> None:
    """Saved sequences hold them: the next server computes none of it."""
    parts = (text("look closely: " * 10), image(1), text("what?"))
    settings = {"source": "fake", "backend": "fake", "isolation": "thread", "context": 1024}
    model = ModelSettings(**settings, prefix_cache_dir=str(tmp_path), options={"image_tokens": _TOKENS})  # type: ignore[arg-type]
    answers = []
    for _ in range(2):
        with served(Settings(models={"fake": model}), timeout=60) as client:
            answers.append(answer(client, *parts))
            body = {"model": "fake", "messages": [{"role": "user", "content": list(parts)}], "details": True}
            details = client.post("/tokenize", json=body).json()["details"]
            encoded = "enginehouse_encoded_images_total" in client.get("/metrics").text

    first, second = answers
    assert said(first) == said(second) and not encoded
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert details["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_models_say_that_they_take_images(client: httpx.Client) -> None:
    models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert models["fake"]["input_modalities"] == ["text", "image"] and models["plain"]["input_modalities"] == ["text"]

    error = refused(client, image(1), model="plain")
    assert error["param"] == "messages[0].content[0]" and "takes text only" in error["message"]


def test_images_of_tools_are_read(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("seen:"), image(1)]},
    ]
    body = {"model": "fake", "messages": messages, "tools": [tool], "max_tokens": 2}
    response = client.post("/v1/chat/completions", json=body)

    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == _TOKENS
    messages[0] = {"role": "system", "content": [image(1)]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages[0].content[0]"


_DATA = base64.b64encode(fake_image_file(1)).decode()
_SURFACES: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url_of(fake_image_file(1))}]}],
            "max_output_tokens": 8,
            "temperature": 0,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _DATA}}
                    ],
                }
            ],
            "max_tokens": 8,
            "temperature": 0,
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "", "images": [_DATA]}],
            "stream": False,
            "options": {"num_predict": 8, "temperature": 0, "repeat_penalty": 1.0},
        },
    ),
}


@pytest.mark.parametrize("surface", _SURFACES)
def test_every_surface_takes_images(client: httpx.Client, surface: str) -> None:
    """The answer is that of a chat."""
    path, body = _SURFACES[surface]
    response = client.post(path, json={"model": "fake", **body}, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text

    assert f'"{json.dumps(said(answer(client, image(1))))[1:-1]}"' in json.dumps(response.json())


def _gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0;"


def _bomb(side: int) -> bytes:
    """A PNG file of some kilobytes with ``side`` pixels on each side."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (side * (side // 8 + 1)), 9)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


_DAMAGED = fake_image_file(1)[:-40] + bytes(28) + fake_image_file(1)[-12:]

_REFUSED: dict[str, tuple[str, str]] = {
    "svg": (url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "not a PNG, JPEG, GIF or WebP image"),
    "bomb": (url_of(_bomb(6000)), "6000 x 6000 pixels, more than"),
    "damaged": (url_of(_DAMAGED), "cannot be decoded"),
    "no frame": (url_of(_gif(4, 4), "gif"), "cannot be decoded"),
    "truncated": (url_of(fake_image_file(1)[:-20]), "ends too early"),
    "empty": (url_of(b""), "it is empty"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_files_that_cannot_be_decoded_are_refused_with_their_place(client: httpx.Client, name: str) -> None:
    url, reason = _REFUSED[name]
    error = refused(client, text("what is"), {"type": "image_url", "image_url": {"url": url}})

    assert error["param"] == "messages[0].content[1].image_url.url" and reason in error["message"]


def test_too_many_images_are_refused(client: httpx.Client) -> None:
    assert "more than 4 images" in refused(client, *map(image, range(5)))["message"]


def test_pixels_count_as_memory_of_the_client() -> None:
    """A small file may have many pixels, which are held until the request has ended."""
    model = ModelSettings(source="fake", backend="fake", isolation="thread", options={"image_tokens": _TOKENS})
    settings = Settings(models={"fake": model}, limits=LimitsSettings(max_client_bytes=2**20))
    with served(settings, timeout=60) as client:
        for _ in range(3):
            answer(client, *(image(number, 256, 256) for number in range(2)))
            response = ask(client, *(image(number, 256, 256) for number in range(8)))

            assert response.status_code == 503 and "max_client_bytes" in response.text, response.text
        content = [image(number, 256, 256) for number in range(8)]
        for path in ("/tokenize", "/v1/chat/completions/input_tokens", "/v1/compress"):
            body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
            response = client.post(path, json=body)

            assert response.status_code == 503 and "max_client_bytes" in response.text, response.text


def test_a_template_without_images_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the model is loaded, and to each request with an image."""
    template = tmp_path / "text.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    model = ModelSettings(
        source="fake", backend="fake", isolation="thread", chat_template=str(template), options={"image_tokens": 4}
    )
    with served(Settings(models={"fake": model}), timeout=60) as client:
        error = refused(client, text("a"), image(1))

    assert error["param"] == "messages[0].content[1]" and "chat template has no place for images" in error["message"]
    assert "chats with images cannot use its chat template 'chat_template'" in caplog.text


def test_an_image_counts_in_metrics_and_is_encoded_once() -> None:
    with connect() as client:
        for first in ("one", "two", "one"):
            answer(client, text(first), image(7))

        def counts() -> dict[str, float]:
            lines = client.get("/metrics").text.splitlines()
            return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

        label = 'model="fake"'
        wait_until(lambda: counts().get(f"enginehouse_reused_images_total{{{label}}}") == 1)
        assert counts()[f"enginehouse_encoded_images_total{{{label}}}"] == 1
        assert counts()[f"enginehouse_embedding_cache_bytes{{{label}}}"] == 8 * _TOKENS


def test_a_worker_that_dies_while_it_encodes_loses_no_text(tmp_path: Path) -> None:
    """Both answers, of the stream beside the image too, are those of a worker that lives."""
    parts = (text("look"), image(1), text("what?"))
    with connect() as client:
        expected = [said(answer(client, text("hello"), max_tokens=40)), said(answer(client, *parts))]
    faults = {"abort_at_encode": 1, "latch": str(tmp_path / "latch")}
    with connect("process", faults=faults, step_delay_s=0.01) as client:
        body = {"model": "fake", "messages": [{"role": "user", "content": [text("hello")]}], "max_tokens": 40}
        with client.stream("POST", "/v1/chat/completions", json={**body, "temperature": 0, "stream": True}) as stream:
            events = (line[6:] for line in stream.iter_lines() if line.startswith("data: {"))
            pieces = [next(events)]
            with_image = answer(client, *parts)
            pieces += events
        streamed = "".join(json.loads(piece)["choices"][0]["delta"].get("content") or "" for piece in pieces)

        assert (tmp_path / "latch").exists()
        assert [streamed, said(with_image)] == expected
