"""WAV files: their formats, damage, and resampling."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from enginehouse.pipeline.media.audio import NoAudio, num_samples, read_wav, samples_of
from enginehouse_testkit.fake_media import fake_audio, fake_audio_file


def wav(data: bytes, bits: int = 16, encoding: int = 1, channels: int = 1, rate: int = 16000, **more: bytes) -> bytes:
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", encoding, channels, rate, rate * frame, frame, bits) + more.get("extension", b"")
    chunks = [(b"fmt ", form), (b"LIST", b"odd"), (b"data", data)]
    body = b"WAVE" + b"".join(
        name + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2) for name, part in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tone(frequency: float, rate: int, seconds: float = 0.5) -> NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)


SINC = np.sinc
TONE = tone(440, 16000)
_SUBFORMAT = struct.pack("<HHIH", 22, 16, 0, 1) + bytes(14)
FORMS = {
    "8 bits": wav((TONE * 127 + 128).astype(np.uint8).tobytes(), 8),
    "16 bits": wav((TONE * 32767).astype("<i2").tobytes()),
    "24 bits": wav((TONE * (2**23 - 1)).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes(), 24),
    "32 bits": wav((TONE * (2**31 - 1)).astype("<i4").tobytes(), 32),
    "float": wav(TONE.astype("<f4").tobytes(), 32, 3),
    "double": wav(TONE.astype("<f8").tobytes(), 64, 3),
    "extensible": wav((TONE * 32767).astype("<i2").tobytes(), encoding=0xFFFE, extension=_SUBFORMAT),
    "stereo": wav(np.repeat((TONE * 32767).astype("<i2"), 2).tobytes(), channels=2),
    "of unknown length": wav((TONE * 32767).astype("<i2").tobytes()).replace(
        b"data" + struct.pack("<I", 2 * len(TONE)), b"data\xff\xff\xff\xff"
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_wav(name: str) -> None:
    file = read_wav(FORMS[name])

    assert file.seconds == 0.5
    assert np.abs(samples_of(file, 16000) - TONE).max() < (0.02 if name == "8 bits" else 1e-4)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 44101, 48000, 96000])
def test_resampling_keeps_tones_and_removes_those_above_half_the_rate(rate: int) -> None:
    file = read_wav(wav(tone(440, rate).astype("<f4").tobytes(), 32, 3, rate=rate))
    samples = samples_of(file, 16000)
    inner = slice(200, -200)

    assert len(samples) == num_samples(file, 16000)
    assert np.abs(samples - tone(440, 16000, 1)[: len(samples)])[inner].max() < 1e-3
    if rate > 32000:
        high = samples_of(read_wav(wav(tone(12000, rate).astype("<f4").tobytes(), 32, 3, rate=rate)), 16000)
        assert np.abs(high)[inner].max() < 1e-3


def test_filters_are_computed_once_for_any_pair_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def sinc(places: NDArray[np.float64]) -> NDArray[np.float64]:
        sizes.append(places.size)
        return SINC(places)

    monkeypatch.setattr(np, "sinc", sinc)
    samples = samples_of(read_wav(wav(tone(440, 44101, 4).astype("<f4").tobytes(), 32, 3, rate=44101)), 16000)

    assert len(samples) == 64000 and sum(sizes) < 16000 * 100


def test_the_fake_recording_is_its_file() -> None:
    audio = fake_audio(3)
    assert samples_of(read_wav(fake_audio_file(3)), audio.rate).tobytes() == audio.samples


BROKEN = {
    "mp3": (b"ID3\x04" + bytes(100), "not a WAV file.*ffmpeg"),
    "empty": (b"", "not a WAV file"),
    "cut": (FORMS["16 bits"][:-7], "ends too early"),
    "no samples": (wav(b""), "no samples"),
    "no data": (FORMS["16 bits"][:36], "ends before its samples"),
    "many chunks": (FORMS["16 bits"][:12] + 1000 * (b"LIST" + bytes(4)) + FORMS["16 bits"][12:], "1000 chunks or more"),
    "compressed": (wav(bytes(100), 4, 0x11), "encoding 17 with 4 bits"),
    "no rate": (wav(bytes(100), rate=0), "0 samples a second"),
    "many channels": (wav(bytes(200), channels=100), "100 channels"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_other_and_damaged_files_are_refused(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(NoAudio, match=reason):
        read_wav(data)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=6), st.integers(0, 100))
def test_any_damage_gives_samples_or_a_refusal(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(wav((TONE[:64] * 32767).astype("<i2").tobytes()))
    for place, value in changes:
        data[place] = value
    try:
        file = read_wav(bytes(data[: len(data) - cut]))
    except NoAudio:
        return
    samples = samples_of(file, 16000)

    assert len(samples) == num_samples(file, 16000) and np.isfinite(samples).all() and np.abs(samples).max() <= 1
