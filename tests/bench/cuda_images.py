"""Images on one GPU: time of encoding, and the gaps of a text stream meanwhile; a part of ``bench.cuda``.

The text models have the shapes of SmolLM2-135M and Llama-3.1-8B, the encoder that of SigLIP-B/16 (86 million, 224 x 224
pixels, 196 tokens). Weights are random.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.media import MediaChunk, MediaInput
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.media import PlacedChunk
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_testkit.media_contract import random_image

from .images import write_hf_folder

__all__ = ["measure_images"]

_SIDE, _NUM_IMAGES, _TOKENS_BEFORE = 224, 8, 40


def measure_images(shapes: tuple[str, ...] = ("smollm2-135m", "llama-3.1-8b")) -> Iterator[str]:
    """Lines about text models with an encoder, which should be read one by one."""
    for shape in shapes:
        folder = write_hf_folder(Path(tempfile.gettempdir()) / f"seeing-{shape}", shape)
        options = HfOptions(device="cuda:0", random_weights=True, slots=8, context=4096, dtype="bfloat16")
        runner: Any = HfBackend().open(ModelSource(str(folder), folder), options, lambda _share, _what: None)
        kinds = f"{runner.info.metadata['layers']}, images: {runner.info.metadata['images']}"
        encode_ms, chunk_ms, text_ms = _times(runner)
        yield f"images, {shape}, {kinds}: encoding {encode_ms:.2f} ms"
        yield f"images, {shape}: its tokens and one of text {chunk_ms:.2f} ms, as many of text {text_ms:.2f} ms"
        before_ms, longest_ms = _gaps(runner)
        yield f"images, {shape}: gap of a stream {before_ms:.2f} ms, the longest beside images {longest_ms:.2f} ms"
        runner.close()


def _times(runner: Any) -> tuple[float, float, float]:
    """Milliseconds to encode an image, to compute its tokens, and to compute as many tokens of text; medians."""
    (chunk,) = runner.prepare_image(random_image(0, _SIDE, _SIDE))
    media = MediaInput(chunk, runner.encode(chunk), np.full(chunk.num_tokens, -1, np.int32))
    text = np.arange(300, 300 + chunk.num_tokens, dtype=np.int32)

    def encode() -> None:
        runner.encode(chunk)

    def compute(given: Any) -> None:
        sequence = runner.open_sequence()
        runner.forward([Span(sequence, 0, given, "none")])
        runner.forward([Span(sequence, chunk.num_tokens, text[:1])]).host()
        runner.free_sequence(sequence)

    return _median_ms(encode), _median_ms(lambda: compute(media)), _median_ms(lambda: compute(text))


def _median_ms(work: Callable[[], None]) -> float:
    times = []
    for _ in range(15):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e3


def _gaps(runner: Any) -> tuple[float, float]:
    """Milliseconds between the tokens of a stream: the median before images come, and the longest after that."""
    engine = StepEngine(runner, EngineSettings(slots=8, prefix_cache=False), {})
    sampling = SamplingParams(temperature=0.0)

    def add(name: str, num_tokens: int, token_ids: list[int], *chunks: PlacedChunk) -> None:
        stopping = StopParams(max_tokens=num_tokens, ignore_eos=True)
        engine.add(EngineRequest(request_id=name, sampling=sampling, stopping=stopping), token_ids, chunks=chunks)

    images = [_placed(runner, number) for number in range(1, _NUM_IMAGES + 1)]
    add("stream", 600, list(range(300, 364)))
    moments, num_before, waiting = list[float](), 0, set[str]()
    while engine.has_work():
        for request_id, event in engine.step():
            if isinstance(event, RequestFinished):
                waiting.discard(request_id)
            elif isinstance(event, TextDelta) and request_id == "stream":
                moments.append(time.perf_counter())
        if len(moments) >= _TOKENS_BEFORE and not num_before:
            num_before = len(moments)
            for number, placed in enumerate(images):
                waiting.add(str(number))
                add(str(number), 1, [*placed.token_ids.tolist(), 300], placed)
        elif num_before and not waiting:
            break
    gaps = np.diff(moments) * 1e3
    return float(np.median(gaps[5 : num_before - 1])), float(gaps[num_before - 1 :].max())


def _placed(runner: Any, number: int) -> PlacedChunk:
    (chunk,) = runner.prepare_image(random_image(number, _SIDE, _SIDE))
    assert isinstance(chunk, MediaChunk)
    return PlacedChunk(0, evolve(chunk, key=f"image {number}"))
