"""Recordings in chats over HTTP, with the fake runner: what they change, what is counted, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, MediaSettings, ModelSettings, Settings
from enginehouse_testkit.fake_media import AUDIO_PLACEHOLDER, AUDIO_RATE, fake_audio_file, fake_image_file
from enginehouse_testkit.served import served

_TOKENS = 6
_FAKE = {"source": "fake", "backend": "fake", "isolation": "thread", "context": 1024}
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}bot:"


def model(**options: int) -> ModelSettings:
    return ModelSettings(**_FAKE, options=options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    template = tmp_path_factory.mktemp("templates") / "text.jinja"
    template.write_text(_PLAIN_TEMPLATE)
    hearing = {"image_tokens": 4, "audio_tokens": _TOKENS}
    without_parts = ModelSettings(**_FAKE, options={"audio_tokens": _TOKENS}, chat_template=str(template))  # type: ignore[arg-type]
    models = {"fake": model(**hearing), "seeing": model(image_tokens=4), "plain": model(), "texts": without_parts}
    with served(Settings(models=models, media=MediaSettings(max_audio_s=3.0)), timeout=60) as client:
        yield client


def audio(number: int, num_samples: int = 100) -> dict[str, Any]:
    data = base64.b64encode(fake_audio_file(number, num_samples)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def image(number: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(fake_image_file(number)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def ask(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8, "temperature": 0}
    return client.post("/v1/chat/completions", json={**body, **fields})


def answer(client: httpx.Client, *parts: dict[str, Any], **fields: Any) -> tuple[str, dict[str, int]]:
    """The text of an answer, and the details of its prompt."""
    response = ask(client, *parts, **fields)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]


def test_answers_depend_on_the_recordings_and_their_places(client: httpx.Client) -> None:
    chats = [
        (text("hear"), audio(1), text("what?")),
        (text("hear"), audio(2), text("what?")),
        (audio(1), text("hear"), text("what?")),
        (text("hear"), audio(1, 2 * AUDIO_RATE), audio(2), text("what?")),
    ]
    answers = [answer(client, *parts) for parts in chats]

    assert answer(client, *chats[0])[0] == answers[0][0] and len({said for said, _ in answers}) == 4
    assert [details["audio_tokens"] for _, details in answers] == [_TOKENS, _TOKENS, _TOKENS, 3 * _TOKENS]
    assert answer(client, *chats[0])[1]["cached_tokens"] > _TOKENS  # the recording is found in the prefix cache


def test_unknown_parts_are_refused_with_the_types_that_are_known(client: httpx.Client) -> None:
    response = ask(client, text("hear"), {"type": "input_video"})

    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "messages[0].content[1].type: must be 'text', 'image_url' or 'input_audio'"


@pytest.mark.parametrize("name", ["fake", "texts"])
def test_recordings_and_texts_keep_their_order(client: httpx.Client, name: str) -> None:
    """Also with a template that knows no recordings: they are between the texts."""
    parts = [text(f"one {AUDIO_PLACEHOLDER}"), audio(1), text("two"), audio(2), text("three")]
    body = {"model": name, "messages": [{"role": "user", "content": parts}], "with_pieces": True}
    response = client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    written = "".join(token["piece"] if token["id"] >= 0 else "*" for token in found["tokens"])

    assert [(chunk["type"], chunk["count"]) for chunk in found["chunks"]] == [("audio", _TOKENS)] * 2
    pieces = [f"one {AUDIO_PLACEHOLDER}", f"({'*' * _TOKENS})", "two", f"({'*' * _TOKENS})", "three"]
    places = [written.index(pieces[0]), written.index("(*"), written.index("two"), written.rindex("(*")]
    assert sorted(places) == places and written.count(pieces[1]) == 2 and places[-1] < written.index("three")


def test_images_and_recordings_in_one_message(client: httpx.Client) -> None:
    pytest.importorskip("PIL")
    said, details = answer(client, audio(1), image(1), text("a"), image(2))
    other, _ = answer(client, image(1), audio(1), text("a"), image(2))

    assert (details["audio_tokens"], details["image_tokens"]) == (_TOKENS, 2 * 4) and said != other


def test_responses_take_recordings(client: httpx.Client) -> None:
    """The answer is that of a chat."""
    asked = [{"role": "user", "content": [audio(1), {"type": "input_text", "text": "what?"}]}]
    body = {"model": "fake", "input": asked, "max_output_tokens": 8, "temperature": 0}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text

    said, _ = answer(client, audio(1), text("what?"))
    assert response.json()["output"][-1]["content"][0]["text"] == said


def test_models_say_what_they_take(client: httpx.Client) -> None:
    models = {one["id"]: one["input_modalities"] for one in client.get("/v1/models").json()["data"]}
    assert models == {
        "fake": ["text", "image", "audio"],
        "seeing": ["text", "image"],
        "plain": ["text"],
        "texts": ["text", "audio"],
    }


def encoded(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a model of text": (audio(1), {"model": "plain"}, "", "takes text only, not input_audio"),
    "a model of images": (audio(1), {"model": "seeing"}, "", "takes text and image_url, not input_audio"),
    "mp3": (
        encoded(b"ID3", "mp3"),
        {},
        ".input_audio.format",
        "as 'wav', not as 'mp3'; convert it first, as with ffmpeg",
    ),
    "mp3 as wav": (encoded(b"ID3" + bytes(50)), {}, ".input_audio.data", "not a WAV file"),
    "another format": (encoded(b"", "ogg"), {}, ".input_audio.format", "must be 'wav'"),
    "no object": ({"type": "input_audio", "input_audio": "x"}, {}, ".input_audio", "must be an object"),
    "no data": ({"type": "input_audio", "input_audio": {"format": "wav"}}, {}, ".input_audio.data", "must be a string"),
    "no base64": (
        {"type": "input_audio", "input_audio": {"format": "wav", "data": "?"}},
        {},
        ".input_audio.data",
        "base64 is damaged",
    ),
    "too long": (audio(1, 4 * AUDIO_RATE), {}, ".input_audio.data", "take 4.0 s, more than 3 s (media.max_audio_s)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_part(client: httpx.Client, name: str) -> None:
    part, fields, place, reason = REFUSED[name]
    response = ask(client, text("hear"), part, **fields)
    error = response.json()["error"]

    assert response.status_code == 400, response.text
    assert error["param"] == f"messages[0].content[1]{place}" and reason in error["message"]


def test_members_that_no_recording_or_image_has_are_listed(client: httpx.Client) -> None:
    pytest.importorskip("PIL")
    heard, seen = audio(1), image(1)
    heard["input_audio"]["language"] = "de"
    seen["image_url"]["size"] = 64
    response = ask(client, heard, seen, text("what?"))

    assert response.status_code == 200, response.text
    listed = response.headers["x-enginehouse-ignored"]
    assert listed == "messages[0].content[0].input_audio.language, messages[0].content[1].image_url.size"
    assert "x-enginehouse-ignored" not in ask(client, audio(1), image(1), text("what?")).headers


def test_samples_count_as_memory_of_the_client() -> None:
    settings = Settings(models={"fake": model(audio_tokens=_TOKENS)}, limits=LimitsSettings(max_client_bytes=2**20))
    with served(settings, timeout=60) as client:
        assert ask(client, audio(1, AUDIO_RATE)).status_code == 200
        response = ask(client, audio(1, 32 * AUDIO_RATE))

    assert response.status_code == 503 and "max_client_bytes" in response.text
