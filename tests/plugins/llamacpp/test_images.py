"""Images on llama.cpp: the contract of images, equality with llama.cpp's own path, and what only this runner does."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from enginehouse.contract.adapters import AdapterSet
from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import StateRefused, StepAborted
from enginehouse.contract.media import DecodedImage, MediaChunk, MediaInput, pseudo_tokens
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.cells import CellMap
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner
from enginehouse_llamacpp.sequences import SequenceTable
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.gguf_writer import write_gguf
from enginehouse_testkit.media_contract import MediaContract

from .media_oracle import Oracle
from .vision_models import (
    GEMMA3,
    IDEFICS3,
    KINDS,
    LLAVA,
    QWEN2VL,
    VisionKind,
    image,
    text_tensors,
    write_projector,
    write_text_model,
)

pytestmark = pytest.mark.llamacpp

_A, _B, _SPACE = 260, 261, 259

Item = int | str
"""What a prompt of a test is made of: a token id, or the name of an image, which is the number of its seed."""


def decoded(name: str, width: int = 64, height: int = 64) -> DecodedImage:
    rgb = image(int(name), width, height).tobytes()
    return DecodedImage(hashlib.sha256(rgb).hexdigest(), width, height, rgb)


def write_model(folder: Path, kind: VisionKind, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_projector(folder / "mmproj-F16.gguf", kind)
    return write_text_model(folder / "tiny-F32.gguf", kind, **more)


def tiny_options(**more: Any) -> LlamaCppOptions:
    return LlamaCppOptions(**{"context": 256, "threads": 1, "slots": 4, "max_sequences": 16, **more})


def open_model(path: Path, **more: Any) -> LlamaCppRunner:
    opened = LlamaCppBackend().open(ModelSource("tiny", path), tiny_options(**more), lambda share, what: None)
    assert isinstance(opened, LlamaCppRunner)
    return opened


def feed_image(
    runner: LlamaCppRunner,
    sequence: int,
    prepared: Sequence[Sequence[int] | MediaChunk],
    adapter: AdapterSet = (),
) -> None:
    for part in prepared:
        if isinstance(part, MediaChunk):
            media = MediaInput(part, runner.encode(part), pseudo_tokens("any", part.num_tokens))
            runner.forward([Span(sequence, runner.length(sequence), media, "none", adapter=adapter)])
        else:
            tokens = np.array(part, np.int32)
            runner.forward([Span(sequence, runner.length(sequence), tokens, "none", adapter=adapter)])


def feed(runner: LlamaCppRunner, sequence: int, items: Sequence[Item], adapter: AdapterSet = ()) -> NDArray[np.float32]:
    """Append text, a token at a time, and images; return the last row. The last item is a token."""
    for item in items:
        if isinstance(item, str):
            feed_image(runner, sequence, runner.prepare_image(decoded(item)), adapter)
        else:
            span = Span(sequence, runner.length(sequence), np.array([item], np.int32), adapter=adapter)
            row = runner.forward([span]).host()[0].copy()
    return row


def fresh(runner: LlamaCppRunner, items: Sequence[Item], adapter: AdapterSet = ()) -> NDArray[np.float32]:
    sequence = runner.open_sequence()
    row = feed(runner, sequence, items, adapter)
    runner.free_sequence(sequence)
    return row


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_text_after_an_image_is_llama_cpps_own(tmp_path: Path, kind: VisionKind) -> None:
    """Equal to the bit, tokens of an answer included; another image gives other logits."""
    path = write_model(tmp_path, kind)
    runner, oracle = open_model(path), Oracle(path, type_v=30)
    expected, first = oracle.answer("a b", oracle.image(image(1)), " ab", 12)
    oracle.close()
    sequence = runner.open_sequence()
    prompt: list[Item] = [1, *runner.tokenizer.encode("a b", False), "1", *runner.tokenizer.encode(" ab", False)]
    row = feed(runner, sequence, prompt)
    answer = [int(row.argmax())]
    while len(answer) < len(expected):
        answer.append(int(feed(runner, sequence, answer[-1:]).argmax()))
    other = fresh(runner, [1, "2", _A]) - fresh(runner, [1, "1", _A])
    chunks = [part for part in runner.prepare_image(decoded("1")) if isinstance(part, MediaChunk)]
    runner.close()

    assert runner.capabilities.media == ("image",) and runner.capabilities.batch_invariant
    assert np.array_equal(row, first) and answer == expected
    assert np.abs(other).max() > 0.01
    assert (chunks[-1].num_tokens, chunks[-1].num_positions) == (kind.num_tokens, kind.num_positions)


@pytest.mark.parametrize("kind", [IDEFICS3, GEMMA3, QWEN2VL], ids=["tiles", "non-causal", "M-RoPE"])
def test_rows_with_an_adapter_and_images_are_those_of_merged_weights(tmp_path: Path, kind: VisionKind) -> None:
    """Text before, between and after two images; the base model gives the same before and after."""
    random, rank, scale, alpha = np.random.default_rng(0), 4, 0.5, 8.0
    halves, merged = dict[str, NDArray[np.float32]](), dict[str, NDArray[np.float32]]()
    for name, weight in text_tensors(kind).items():
        if weight.ndim == 2 and name.split(".")[-2] in ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_down"):
            a, b = (
                random.standard_normal(size).astype(np.float32) / 4
                for size in ((rank, weight.shape[1]), (len(weight), rank))
            )
            halves |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
            merged[name] = weight + np.float32(scale * alpha / rank) * (b @ a)
    values = {"general.architecture": kind.architecture, "general.type": "adapter", "adapter.type": "lora"}
    adapter = write_gguf(tmp_path / "adapter.gguf", {**values, "adapter.lora.alpha": alpha}, halves)
    runner = open_model(write_model(tmp_path / "base", kind))
    oracle = open_model(write_model(tmp_path / "merged", kind, tensors=merged))
    handle = runner.load_adapter(adapter)
    items: list[Item] = [1, _A, _B, "1", _B, _A, "2", _A]
    before, found = fresh(runner, items), fresh(runner, items, ((handle, scale),))
    again, expected = fresh(runner, items), fresh(oracle, items)
    runner.close()
    oracle.close()

    assert np.abs(found - expected).max() < 0.05  # keys and values are float16
    assert np.abs(found - before).max() > 0.5
    assert np.array_equal(before, again)


def seeing(path: Path, **more: Any) -> ModelUnderTest:
    """A small cache and small batches, so that cells are moved and sequences swapped out."""
    options = tiny_options(cache_tokens=384, n_batch=64, **more)
    return ModelUnderTest(backend=LlamaCppBackend(), source=ModelSource("tiny", path), options=options)


class TestImages(MediaContract):
    """Equal to the bit."""

    num_image_steps = 500

    @pytest.fixture(scope="class", params=[IDEFICS3, QWEN2VL, GEMMA3], ids=["tiles", "M-RoPE", "non-causal"])
    @classmethod
    def model(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        return seeing(write_model(tmp_path_factory.mktemp("seeing"), request.param))


class TestImagesWithCellsInAnyOrder(MediaContract):
    """llama.cpp's own order of cells; keys and values are rounded to 16 bits, and logits are up to 20."""

    max_logit_difference = 0.5
    min_image_difference = 1.0

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        return seeing(write_model(tmp_path_factory.mktemp("seeing"), QWEN2VL), batch_invariant=False)


class TestImagesInSlidingWindows(MediaContract):
    """Gemma 3's layers: most attend to a window, here shorter than an image and the text around it."""

    max_logit_difference = 0.3

    @pytest.fixture(scope="class", params=[True, False], ids=["whole cache", "windows only"])
    @classmethod
    def model(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
        path = write_model(tmp_path_factory.mktemp("seeing"), GEMMA3, **{"gemma3.attention.sliding_window": 24})
        return seeing(path, swa_full=request.param)


def test_states_with_images_belong_to_their_projector(tmp_path: Path) -> None:
    """They are loaded where model, settings and projector are the same, and refused beside another projector."""
    path = write_model(tmp_path, QWEN2VL)
    first, same = open_model(path), open_model(path)
    sequence = first.open_sequence()
    feed(first, sequence, [1, _A, "1", _B, "2", _A])
    data = first.save(sequence)
    loaded = same.load(data)
    expected = feed(first, sequence, ["1", _B])
    assert np.array_equal(feed(same, loaded, ["1", _B]), expected)
    assert same.truncate(loaded, 4) == first.truncate(sequence, 4)
    assert np.array_equal(feed(same, loaded, [_B]), feed(first, sequence, [_B]))
    for place in range(0, 64):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(StateRefused):
            same.load(memoryview(damaged))
    write_projector(path.with_name("mmproj-F16.gguf"), QWEN2VL, seed=5)
    other = open_model(path)
    with pytest.raises(StateRefused, match="other settings"):
        other.load(data)
    for runner in (first, same, other):
        runner.close()


def test_a_large_image_is_divided(tmp_path: Path) -> None:
    """Into tiles with marks between them (Idefics3), or into several batches (M-RoPE), with the same result."""
    runner = open_model(write_model(tmp_path / "tiles", IDEFICS3))
    tiles = [part for part in runner.prepare_image(decoded("1", 128, 64)) if isinstance(part, MediaChunk)]
    runner.close()
    path = write_model(tmp_path / "batches", QWEN2VL)
    rows = []
    for size in (32, 256):
        runner = open_model(path, n_batch=size, slots=2, max_sequences=4)
        sequence = runner.open_sequence()
        feed(runner, sequence, [1, _A])
        feed_image(runner, sequence, runner.prepare_image(decoded("1", 160, 96)))
        rows.append((runner.length(sequence), feed(runner, sequence, [_B])))
        runner.close()

    assert len(tiles) == 3  # an overview and two tiles
    assert rows[0][0] == rows[1][0] == 2 + 1 + 60 + 1
    assert np.array_equal(rows[0][1], rows[1][1])


@pytest.mark.parametrize("kind", [QWEN2VL, evolve(LLAVA, image=480)], ids=["M-RoPE", "plain"])
def test_an_aborted_image_leaves_nothing(tmp_path: Path, kind: VisionKind) -> None:
    """Whenever the abort comes, before the first batch of an image or between later ones."""
    runner = open_model(write_model(tmp_path, kind), context=2048, n_batch=32, slots=1, max_sequences=2)
    sequence = runner.open_sequence()
    chunk = next(part for part in runner.prepare_image(decoded("1", 480, 480)) if isinstance(part, MediaChunk))
    media = MediaInput(chunk, runner.encode(chunk), pseudo_tokens("any", chunk.num_tokens))
    feed(runner, sequence, [1, _A])
    started = time.perf_counter()
    runner.forward([Span(sequence, 2, media, "none")])
    usual_s = time.perf_counter() - started
    expected = {2: fresh(runner, [1, _A, _B]), 2 + chunk.num_tokens: feed(runner, sequence, [_B])}
    is_early = False
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, *[0.0] * 50):  # the thread may get no processor during a pass
        if is_early and share == 0.0:
            break
        runner.truncate(sequence, 2)
        is_over, is_aborted = threading.Event(), False
        thread = threading.Thread(target=_abort, args=(runner, share * usual_s, is_over))
        thread.start()
        try:
            runner.forward([Span(sequence, 2, media, "none")])
        except StepAborted as error:
            is_aborted = True
            is_early = is_early or share == 0.0
            assert error.lengths == {sequence: 2}
        finally:
            is_over.set()
            thread.join()
        assert runner.length(sequence) == (2 if is_aborted else 2 + chunk.num_tokens)
        assert np.array_equal(feed(runner, sequence, [_B]), expected[runner.length(sequence) - 1])

    assert is_early
    runner.close()


class _StateMemory:
    """llama.cpp's memory of a hybrid model, whose state cannot be cut: it refuses to remove a part of a sequence."""

    is_recurrent = True
    position = 0

    def next_position(self, sequence: int) -> int:
        return self.position

    def can_cut(self, sequence: int, position: int) -> bool:
        return False

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        if start == 0:
            self.position = 0
        return start in (0, self.position)


@pytest.mark.parametrize("num_placed", [0, 8, 16])
def test_a_state_that_holds_a_part_of_an_image_is_dropped_as_a_whole(num_placed: int) -> None:
    """A small model of this kind with a projector cannot be made; what is held must never differ from what is said."""
    memory = _StateMemory()
    sequences = SequenceTable(memory, CellMap(256, 64), 2, 256, False, state_format="")  # type: ignore[arg-type]
    sequence = sequences.open()
    sequences.append([sequence], [5])
    memory.position = 5
    sequences.append_chunk(sequence, [8, 8], 16)
    memory.position += num_placed
    sequences.drop_chunk(sequence)

    assert sequences.held(sequence).num_tokens == memory.position == (0 if num_placed else 5)
    assert sequences.num_free_tokens == 256 - memory.position


def _abort(runner: LlamaCppRunner, delay_s: float, is_over: threading.Event) -> None:
    """Abort again and again, because a pass clears the request when it begins."""
    is_over.wait(delay_s)
    while not is_over.is_set():
        runner.abort()


def test_a_fork_after_an_image_is_swapped_out_and_back(tmp_path: Path) -> None:
    """Only what is its own leaves the cache; under M-RoPE, that begins at another position than its number."""
    runner = open_model(write_model(tmp_path, QWEN2VL), cache_tokens=384, n_batch=64)
    source = runner.open_sequence()
    prompt: list[Item] = [1, "1", _A]
    feed(runner, source, prompt)
    forked, _ = runner.fork(source, runner.length(source))
    own: list[Item] = [3 + number for number in range(40)]
    feed(runner, forked, own)
    busy = runner.open_sequence()
    for number in range(120):  # long enough for cells to be moved
        runner.truncate(busy, 0)
        feed(runner, busy, [1, _A, _B, number + 3, _A])
    row = feed(runner, forked, [_B])

    assert np.array_equal(row, fresh(runner, [*prompt, *own, _B]))
    runner.close()
