"""Recordings on llama.cpp: the contract of media, equality with llama.cpp's own path, and damaged projectors."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.media import DecodedAudio, DecodedImage, MediaChunk, MediaInput, pseudo_tokens
from enginehouse.contract.types import DecodedMedia
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.projector_files import read_projector, recording_bytes
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.media_contract import MediaContract
from enginehouse_testkit.served import served

from .audio_models import NUM_BINS, NUM_TOKENS, RATE, audio_tensors, audio_values, recording, write_audio_projector
from .media_oracle import Oracle
from .vision_models import IDEFICS3, QWEN2VL, VisionKind, write_projector, write_text_model

pytestmark = pytest.mark.llamacpp


def write_model(folder: Path, kind: VisionKind = IDEFICS3) -> Path:
    """A text model of a kind, with a projector of recordings."""
    write_audio_projector(folder / "mmproj-F16.gguf")
    return write_text_model(folder / "tiny-F32.gguf", kind)


def audio(seed: int, seconds: float = 1.0) -> DecodedAudio:
    samples = recording(seed, seconds).tobytes()
    return DecodedAudio(hashlib.sha256(samples).hexdigest(), RATE, samples)


def open_model(path: Path, **more: Any) -> LlamaCppRunner:
    options = LlamaCppOptions(**{"context": 256, "threads": 1, "slots": 2, **more})
    opened = LlamaCppBackend().open(ModelSource("tiny", path), options, lambda share, what: None)
    assert isinstance(opened, LlamaCppRunner)
    return opened


class TestRecordings(MediaContract):
    """Equal to the bit."""

    num_image_steps = 40

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        path = write_model(tmp_path_factory.mktemp("hearing"))
        options = LlamaCppOptions(context=256, threads=1, slots=4, max_sequences=16, cache_tokens=384, n_batch=64)
        return ModelUnderTest(backend=LlamaCppBackend(), source=ModelSource("tiny", path), options=options)

    @pytest.fixture(scope="class")
    @classmethod
    def image_pair(cls) -> tuple[DecodedMedia, DecodedMedia]:
        return audio(1), audio(2)


@pytest.mark.parametrize("kind", [IDEFICS3, QWEN2VL], ids=["plain", "M-RoPE"])
def test_text_after_a_recording_is_llama_cpps_own(tmp_path: Path, kind: VisionKind) -> None:
    """Equal to the bit, tokens of an answer included."""
    path = write_model(tmp_path, kind)
    runner, oracle = open_model(path), Oracle(path, type_v=30)
    expected, first = oracle.answer("a b", oracle.recording(recording(1)), " ab", 12)
    oracle.close()
    sequence = runner.open_sequence()

    def feed(token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        for token_id in token_ids:
            span = Span(sequence, runner.length(sequence), np.array([token_id], np.int32))
            row = runner.forward([span]).host()[0].copy()
        return row

    feed([1, *runner.tokenizer.encode("a b", False)])
    (chunk,) = runner.prepare_audio(audio(1))
    assert isinstance(chunk, MediaChunk)
    media = MediaInput(chunk, runner.encode(chunk), pseudo_tokens("any", chunk.num_tokens, "audio"))
    runner.forward([Span(sequence, runner.length(sequence), media, "none")])
    row = feed(runner.tokenizer.encode(" ab", False))
    answer = [int(row.argmax())]
    while len(answer) < len(expected):
        answer.append(int(feed(answer[-1:]).argmax()))
    runner.close()

    assert runner.capabilities.media == ("audio",) and runner.audio_rate == RATE
    assert (chunk.kind, chunk.num_tokens, chunk.num_positions) == ("audio", NUM_TOKENS, NUM_TOKENS)
    assert np.array_equal(row, first) and answer == expected


def test_a_long_recording_has_a_chunk_for_each_half_minute(tmp_path: Path) -> None:
    runner = open_model(write_model(tmp_path))
    parts = runner.prepare_audio(audio(1, 70))
    runner.close()

    chunks = [part for part in parts if isinstance(part, MediaChunk)]
    assert [chunk.num_tokens for chunk in chunks] == [NUM_TOKENS] * 3
    assert [chunk.num_bytes for chunk in chunks] == [4 * 3000 * NUM_BINS] * 3


def test_a_recording_that_is_one_chunk_is_counted_as_a_whole(tmp_path: Path) -> None:
    """As a Conformer or Parakeet gets it: five minutes, not half of one."""
    header = read_projector(write_audio_projector(tmp_path / "mmproj.gguf"))

    assert recording_bytes(header, 300.0, 1) == 4 * 30_000 * NUM_BINS
    assert recording_bytes(header, 300.0, 10) == recording_bytes(header, 1.0, 1) == 4 * 3000 * NUM_BINS


@pytest.mark.parametrize("num_samples", [1, 2, 161])
def test_a_recording_of_a_few_samples_is_read(tmp_path: Path, num_samples: int) -> None:
    """mtmd ends the process for one sample."""
    runner = open_model(write_model(tmp_path))
    (chunk,) = runner.prepare_audio(DecodedAudio("", RATE, recording(1)[:num_samples].tobytes()))
    assert isinstance(chunk, MediaChunk)
    embedding = runner.encode(chunk)
    runner.close()

    assert chunk.num_tokens == NUM_TOKENS
    assert np.isfinite(embedding).all() and embedding.any()


def test_chats_with_recordings_over_http(tmp_path: Path) -> None:
    """The model's template knows no recordings."""
    samples = (recording(1) * 32767).astype("<i2").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    body_of_file = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    file = b"RIFF" + struct.pack("<I", len(body_of_file)) + body_of_file
    part = {"data": base64.b64encode(file).decode(), "format": "wav"}
    content = [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": part}]
    body = {"model": "hearing", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    model = ModelSettings(source=str(write_model(tmp_path)), context=256, options={"threads": 1})
    with served(Settings(models={"hearing": model}), timeout=60) as client:
        answers = [client.post("/v1/chat/completions", json=body) for _ in range(2)]
        modalities = client.get("/v1/models").json()["data"][0]["input_modalities"]

    assert [one.status_code for one in answers] == [200, 200], answers[0].text
    first, second = (one.json() for one in answers)
    assert modalities == ["text", "audio"]
    assert first["usage"]["prompt_tokens_details"]["audio_tokens"] == NUM_TOKENS
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > NUM_TOKENS
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another width": (lambda path: write_audio_projector(path, width=64), "n_embd"),
    "no stack": (
        lambda path: write_audio_projector(path, **{"clip.audio.projector.stack_factor": 0}),
        "audio.projector.stack_factor is 0",
    ),
    "another width of the encoder": (
        lambda path: write_audio_projector(path, **{"clip.audio.embedding_length": 16}),
        r"a\.position_embd\.weight has the shape 32 x 1500, not 16 x",
    ),
    "other bins": (
        lambda path: write_audio_projector(path, **{"clip.audio.num_mel_bins": 80}),
        r"a\.conv1d\.1\.weight has the shape 3 x 16 x 32, not ... x 80",
    ),
    "a voice for speech": (
        lambda path: write_audio_projector(path, **{"clip.audio.projector_type": "qwen3tts_spkenc"}),
        "takes neither images nor recordings",
    ),
}


@pytest.mark.parametrize(("make", "problem"), REFUSED.values(), ids=REFUSED)
def test_projectors_that_do_not_fit_are_refused(tmp_path: Path, make: Callable[[Path], object], problem: str) -> None:
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    make(tmp_path / "mmproj.gguf")
    with pytest.raises(ModelLoadError, match=problem) as caught:
        open_model(path, mmproj="mmproj.gguf")

    assert "mmproj.gguf" in caught.value.message


def test_a_projector_of_both_kinds_takes_both(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    kinds = {"clip.projector_type": "", "clip.vision.projector_type": "idefics3"}
    write_projector(tmp_path / "mmproj.gguf", IDEFICS3, tensors=audio_tensors(36), **audio_values(36), **kinds)
    runner = open_model(path)
    image = DecodedImage("", 64, 64, bytes(3 * 64 * 64))
    parts = [*runner.prepare_image(image), *runner.prepare_audio(audio(1))]
    chunks = [part for part in parts if isinstance(part, MediaChunk)]
    embeddings = [runner.encode(chunk) for chunk in chunks]
    runner.close()

    assert runner.capabilities.media == ("image", "audio")
    assert list(dict.fromkeys(chunk.kind for chunk in chunks)) == ["image", "audio"]
    assert all(chunk.num_bytes > 0 for chunk in chunks)
    assert all(np.isfinite(embedding).all() and embedding.any() for embedding in embeddings)


def test_a_projector_of_images_takes_no_recordings(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "tiny.gguf", IDEFICS3)
    write_projector(tmp_path / "mmproj.gguf", IDEFICS3)
    runner = open_model(path)
    runner.close()

    assert runner.capabilities.media == ("image",) and runner.audio_rate == 0
