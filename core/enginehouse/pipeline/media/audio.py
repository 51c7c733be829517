"""Recordings of messages: the samples of a WAV file, resampled to the rate that a model needs.

WAV has no compression, so a file is read in a thread of the server: numpy reads numbers in place, and the size of all
arrays follows from the file's, which is limited. Other formats are refused. Does not know requests or models.
"""

from __future__ import annotations

import math
import struct

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

TAKEN = "a WAV file of PCM or floating-point samples"
"""Description of the files that are taken."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_RATE, _MAX_CHANNELS = 384_000, 8
_NO_SIZE = (0, 0xFFFFFFFF)
"""Sizes that programs write that do not know the length before the end."""

_MAX_CHUNKS = 1000
"""Chunks before the samples; programs write a few."""

_HALF_WIDTH = 16
"""Zero crossings of the resampling filter on each side."""

_MAX_NUMBERS = 2**20
"""Numbers of the arrays of one step of the resampling, which bounds its memory."""


class NoAudio(ValueError):
    """The bytes are not a usable recording; the message gives the reason."""


@frozen
class WavFile:
    """A WAV file that was checked.

    Attributes:
        rate: frames of a second; a frame has one number for each channel.
        num_channels: numbers in a frame.
        kind: type of a number as numpy names it; 24-bit numbers are ``i3``.
        frames: the numbers, in place.
    """

    rate: int
    num_channels: int
    kind: str
    frames: memoryview

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.frames) // (self.num_channels * int(self.kind[-1]))

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.num_frames / self.rate


def read_wav(data: bytes) -> WavFile:
    """Parse a WAV file, and find its samples.

    Raises:
        NoAudio: it is of another type, damaged or empty.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise NoAudio(f"it is not {TAKEN}; convert it, for example with: ffmpeg -i FILE -ac 1 -ar 16000 out.wav")
    form, begin, end = _chunks(data)
    encoding, num_channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", form)
    if encoding == _EXTENSIBLE and len(form) >= 26:
        (encoding,) = struct.unpack_from("<H", form, 24)
    kind = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 24): "<i3", (_PCM, 32): "<i4"}.get((encoding, bits))
    kind = kind or {(_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8"}.get((encoding, bits))
    if kind is None:
        raise NoAudio(f"its samples have the encoding {encoding} with {bits} bits; {TAKEN} is needed")
    if not 1 <= num_channels <= _MAX_CHANNELS or frame_bytes != num_channels * int(kind[-1]):
        raise NoAudio(f"it has {num_channels} channels in frames of {frame_bytes} bytes")
    if not 1000 <= rate <= _MAX_RATE:
        raise NoAudio(f"it has {rate} samples a second; 1000 to {_MAX_RATE} are taken")
    frames = memoryview(data)[begin : end - (end - begin) % frame_bytes]
    if not frames:
        raise NoAudio("it has no samples")
    return WavFile(rate, num_channels, kind, frames)


def _chunks(data: bytes) -> tuple[bytes, int, int]:
    """Return the format, and the begin and the end of the samples."""
    position, form = 12, b""
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(data):
            raise NoAudio("it ends before its samples")
        name, size = struct.unpack_from("<4sI", data, position)
        begin, end = position + 8, position + 8 + size
        if name == b"data" and size in _NO_SIZE:
            end = len(data)
        if end > len(data):
            raise NoAudio("it ends too early")
        if name == b"data":
            if len(form) < 16:
                raise NoAudio("its header says no format")
            return form, begin, end
        form = data[begin:end] if name == b"fmt " else form
        position = end + size % 2
    raise NoAudio(f"it has {_MAX_CHUNKS} chunks or more before its samples")


def samples_of(file: WavFile, rate: int) -> NDArray[np.float32]:
    """Return the mean of all channels at another rate, (num_samples,) float32 from -1 to 1."""
    mono = _numbers(file).reshape(-1, file.num_channels).mean(axis=1, dtype=np.float32)
    resampled = np.nan_to_num(_resampled(mono, file.rate, rate), posinf=1.0, neginf=-1.0)
    return np.clip(resampled, np.float32(-1), np.float32(1)).astype(np.float32)


def num_samples(file: WavFile, rate: int) -> int:
    """Return the number of samples at another rate."""
    return max(1, math.ceil(file.num_frames * rate / file.rate))


def _numbers(file: WavFile) -> NDArray[np.float32]:
    """Return all numbers, from -1 to 1."""
    if file.kind == "<i3":
        wide = np.zeros((len(file.frames) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(file.frames, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    numbers = np.frombuffer(file.frames, file.kind)
    if file.kind == "u1":
        return (numbers.astype(np.float32) - np.float32(128)) / np.float32(128)
    scale = 2 ** (8 * int(file.kind[-1]) - 1) if file.kind[1] == "i" else 1
    return np.asarray(numbers.astype(np.float32) / np.float32(scale), np.float32)


def _resampled(samples: NDArray[np.float32], old_rate: int, rate: int) -> NDArray[np.float32]:
    """Resample by a windowed sinc, one filter for each phase of the new samples between the old ones.

    Source: J. O. Smith, Digital Audio Resampling; with a Hann window.
    """
    if old_rate == rate:
        return samples
    common = math.gcd(old_rate, rate)
    up, down = rate // common, old_rate // common
    cutoff = min(1.0, up / down)  # of the narrower band, so that nothing is mirrored into it
    reach = math.ceil(_HALF_WIDTH / cutoff)
    count = max(1, math.ceil(len(samples) * up / down))
    padded = np.pad(samples, (reach, 2 * reach + 1))
    resampled = np.empty(count, np.float32)
    taps = np.arange(-reach, reach + 1)
    # The filters repeat after ``up`` samples. Together they have about 32 * max(up, down) numbers; rates have a limit.
    table = np.empty((min(up, count), len(taps)), np.float32)
    num_rows = max(1, _MAX_NUMBERS // len(taps))
    for first in range(0, len(table), num_rows):
        phases = np.arange(first, min(first + num_rows, len(table))) * down % up
        distances = taps - phases[:, np.newaxis] / up
        window = np.cos(np.pi / 2 * np.clip(distances / (reach + 1), -1, 1)) ** 2
        filters = np.sinc(cutoff * distances) * window
        table[first : first + len(phases)] = filters / filters.sum(axis=1, keepdims=True)
    for first in range(0, count, num_rows):
        numbers = np.arange(first, min(first + num_rows, count))
        old = padded[(numbers * down // up)[:, np.newaxis] + taps + reach]
        resampled[first : first + len(numbers)] = np.einsum("ij,ij->i", old, table[numbers % up])
    return resampled
