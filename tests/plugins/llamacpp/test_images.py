"""Images on llama.cpp: equal to its own path, and to the bit after forks, cuts, swaps and saved states."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import CacheFull, InvalidRequest, InvalidSpan, StateRefused, StepAborted
from enginehouse.contract.media import DecodedImage, MediaChunk, MediaInput, pseudo_tokens
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.library import load_library
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.runner import LlamaCppRunner

from .vision_models import GEMMA3, IDEFICS3, KINDS, QWEN2VL, VisionKind, image, write_projector, write_text_model

pytestmark = pytest.mark.llamacpp

_A, _B, _SPACE = 260, 261, 259
_MARKER = "<__media__>"

Item = int | str
"""What a prompt of a test is made of: a token id, or the name of an image, which is the number of its seed."""


def decoded(name: str, width: int = 64, height: int = 64) -> DecodedImage:
    rgb = image(int(name), width, height).tobytes()
    return DecodedImage(hashlib.sha256(rgb).hexdigest(), width, height, rgb)


def write_model(folder: Path, kind: VisionKind) -> Path:
    folder.mkdir(exist_ok=True)
    write_projector(folder / "mmproj-F16.gguf", kind)
    return write_text_model(folder / "tiny-F32.gguf", kind)


def open_model(path: Path, **options: object) -> LlamaCppRunner:
    sizes = {"context": 256, "threads": 1, "slots": 4, "max_sequences": 16, **options}
    opened = LlamaCppBackend().open(ModelSource("tiny", path), LlamaCppOptions(**sizes), lambda share, what: None)
    assert isinstance(opened, LlamaCppRunner)
    return opened


def feed_image(runner: LlamaCppRunner, sequence: int, prepared: Sequence[Sequence[int] | MediaChunk]) -> None:
    for part in prepared:
        if isinstance(part, MediaChunk):
            media = MediaInput(part, runner.encode(part), pseudo_tokens("any", part.num_tokens))
            runner.forward([Span(sequence, runner.length(sequence), media, "none")])
        else:
            runner.forward([Span(sequence, runner.length(sequence), np.array(part, np.int32), "none")])


def feed(runner: LlamaCppRunner, sequence: int, items: Sequence[Item]) -> NDArray[np.float32]:
    """Append text, a token at a time, and images; return the last row. The last item is a token."""
    for item in items:
        if isinstance(item, str):
            feed_image(runner, sequence, runner.prepare_image(decoded(item)))
        else:
            span = Span(sequence, runner.length(sequence), np.array([item], np.int32))
            row = runner.forward([span]).host()[0].copy()
    return row


def fresh(runner: LlamaCppRunner, items: Sequence[Item]) -> NDArray[np.float32]:
    sequence = runner.open_sequence()
    row = feed(runner, sequence, items)
    runner.free_sequence(sequence)
    return row


class Oracle:
    """llama.cpp's own path: mtmd_helper_eval_chunks, then llama_decode of single tokens."""

    def __init__(self, path: Path, type_v: int) -> None:
        library = load_library()
        self.llama, self.mtmd = library.bindings, library.mtmd
        params = self.llama.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), params)
        params = self.llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        params.type_v = type_v
        self.context = self.llama.llama_init_from_model(self.model, params)
        params = self.mtmd.mtmd_context_params_default()
        params.n_threads = 1
        projector = path.with_name("mmproj-F16.gguf")
        self.projector = self.mtmd.mtmd_init_from_file(str(projector).encode(), self.model, params)
        assert self.model and self.context and self.projector

    def answer(self, text: str, name: str, num_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
        """Return the most probable tokens after a text with an image, and the first row."""
        llama, mtmd, pixels = self.llama, self.mtmd, image(int(name))
        bitmap = mtmd.mtmd_bitmap_init(64, 64, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        chunks, data = mtmd.mtmd_input_chunks_init(), text.encode()
        prompt = mtmd.mtmd_input_text(data, len(data), True, True)
        assert mtmd.mtmd_tokenize(self.projector, chunks, prompt, (ctypes.c_void_p * 1)(bitmap), 1) == 0
        position, answer, first = ctypes.c_int32(0), list[int](), None
        done = mtmd.mtmd_helper_eval_chunks(
            self.projector, self.context, chunks, 0, 0, 256, True, ctypes.byref(position)
        )
        assert done == 0
        vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        batch = llama.llama_batch_init(1, 0, 1)
        for step in range(num_tokens):
            row = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (vocab_size,)).copy()
            first = row if first is None else first
            answer.append(int(row.argmax()))
            batch.n_tokens, batch.token[0], batch.pos[0] = 1, answer[-1], position.value + step
            batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
            assert llama.llama_decode(self.context, batch) == 0
        llama.llama_batch_free(batch)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        assert first is not None
        return answer, first

    def close(self) -> None:
        self.mtmd.mtmd_free(self.projector)
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_text_after_an_image_is_llama_cpps_own(tmp_path: Path, kind: VisionKind) -> None:
    """Equal to the bit, tokens of an answer included; another image gives other logits."""
    path = write_model(tmp_path, kind)
    runner, oracle = open_model(path), Oracle(path, type_v=30)
    expected, first = oracle.answer(f"a b{_MARKER} ab", "1", 12)
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


_SEEING = {"M-RoPE": (QWEN2VL, True), "M-RoPE, cells in any order": (QWEN2VL, False), "non-causal": (GEMMA3, True)}


@pytest.fixture(scope="module", params=_SEEING.values(), ids=_SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppRunner]:
    """Small cache and batches, so that cells are compacted and sequences swapped out."""
    kind, is_invariant = request.param
    path = write_model(tmp_path_factory.mktemp("seeing"), kind)
    runner = open_model(path, cache_tokens=384, n_batch=64, batch_invariant=is_invariant)
    assert runner.capabilities.batch_invariant == is_invariant
    yield runner
    runner.close()


def is_equal(runner: LlamaCppRunner, row: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """To the bit where the runner promises it, else up to the rounding of keys and values."""
    if runner.capabilities.batch_invariant:
        return np.array_equal(row, expected)
    return bool(np.abs(row - expected).max() < 0.1)


def test_random_steps_with_images_equal_fresh_sequences(seeing: LlamaCppRunner) -> None:
    """Forks, cuts and saved states, in a cache so small that cells are moved and sequences swapped out."""
    rng = np.random.default_rng(7)
    lengths = {name: _image_length(seeing, name) for name in "12"}
    held: dict[int, list[Item]] = {}
    for _ in range(900):
        action = rng.choice(["open", "text", "text", "text", "image", "fork", "cut", "free", "save"])
        if action == "open" or not held:
            if len(held) < 5:
                held[seeing.open_sequence()] = []
            continue
        sequence = int(rng.choice(list(held)))
        items = held[sequence]
        if len(held) > 6 or seeing.length(sequence) > 100 or seeing.free_tokens() < 150:
            action = "free"
        if action == "text":
            items.append(int(rng.integers(3, 262)))
            row = feed(seeing, sequence, items[-1:])
            assert rng.random() > 0.1 or is_equal(seeing, row, fresh(seeing, items))
        elif action == "image":
            items.append(str(rng.choice(["1", "2"])))
            feed_image(seeing, sequence, seeing.prepare_image(decoded(str(items[-1]))))
        elif action in ("cut", "fork"):
            count = int(rng.integers(0, len(items) + 1))
            length = sum(lengths[item] if isinstance(item, str) else 1 for item in items[:count])
            if action == "cut":
                assert seeing.truncate(sequence, length) == length
                held[sequence] = items[:count]
            else:
                forked, shared = seeing.fork(sequence, length)
                assert shared == length
                held[forked] = items[:count]
        elif action == "save" and items:
            held[seeing.load(seeing.save(sequence))] = list(items)
        elif action == "free":
            seeing.free_sequence(sequence)
            del held[sequence]
    for sequence, items in held.items():
        assert is_equal(seeing, feed(seeing, sequence, [_A]), fresh(seeing, [*items, _A]))
        seeing.free_sequence(sequence)

    assert seeing.free_tokens() == seeing.capabilities.cache_tokens


def _image_length(runner: LlamaCppRunner, name: str) -> int:
    return sum(
        part.num_tokens if isinstance(part, MediaChunk) else len(part) for part in runner.prepare_image(decoded(name))
    )


def test_a_cut_inside_an_image_drops_it(seeing: LlamaCppRunner) -> None:
    """Also of a fork; the text after it may then be another."""
    begin = [1, _A, _B]
    marks, chunk = seeing.prepare_image(decoded("1"))[:2]
    assert isinstance(chunk, MediaChunk) and not isinstance(marks, MediaChunk)
    start = len(begin) + len(marks)
    sequence = seeing.open_sequence()
    feed(seeing, sequence, [*begin, "1", _A])
    for length in (start + 1, start + chunk.num_tokens - 1):
        assert seeing.kept_length(sequence, length) == start
        forked, shared = seeing.fork(sequence, length)
        assert shared == seeing.length(forked) == start
        seeing.free_sequence(forked)
    assert seeing.truncate(sequence, start + 1) == start
    row = feed(seeing, sequence, [_B])

    assert is_equal(seeing, row, fresh(seeing, [*begin, *marks, _B]))
    seeing.free_sequence(sequence)


def test_wrong_spans_with_images_change_nothing(seeing: LlamaCppRunner) -> None:
    chunk = next(part for part in seeing.prepare_image(decoded("1")) if isinstance(part, MediaChunk))
    embedding, ids = seeing.encode(chunk), pseudo_tokens("any", chunk.num_tokens)
    sequence, other = seeing.open_sequence(), seeing.open_sequence()
    good = MediaInput(chunk, embedding, ids)
    foreign = MediaChunk(num_tokens=chunk.num_tokens, num_positions=chunk.num_tokens, data=None)
    text = Span(other, 0, np.array([1], np.int32))
    wrong = [
        [Span(sequence, 0, good, "none"), text],
        [text, Span(sequence, 0, good, "none")],
        [Span(sequence, 0, good, "last")],
        [Span(sequence, 1, good, "none")],
        [Span(sequence, 0, MediaInput(chunk, embedding[:-1], ids), "none")],
        [Span(sequence, 0, MediaInput(chunk, embedding.astype(np.float64), ids), "none")],
        [Span(sequence, 0, good, "none", adapter=((1, 1.0),))],
    ]
    for spans in wrong:
        with pytest.raises(InvalidSpan):
            seeing.forward(spans)
    with pytest.raises(InvalidSpan, match="another runner"):
        seeing.encode(foreign)
    with pytest.raises(InvalidRequest, match="64 x 64") as caught:
        seeing.prepare_image(DecodedImage("", 64, 64, b"short", param="messages.0.content.1"))

    assert caught.value.param == "messages.0.content.1"
    assert (seeing.length(sequence), seeing.length(other)) == (0, 0)
    assert seeing.free_tokens() == seeing.capabilities.cache_tokens
    seeing.free_sequence(sequence)
    seeing.free_sequence(other)


def test_an_image_that_does_not_fit_is_left_out(seeing: LlamaCppRunner) -> None:
    """Nothing is changed, and it fits once there is room."""
    filling = seeing.open_sequence(), seeing.open_sequence()
    for sequence, count in zip(filling, (254, 120), strict=True):
        for at in range(0, count, 62):
            ids = np.full(min(62, count - at), _A, np.int32)
            seeing.forward([Span(sequence, at, ids, "none")])
    waiting = seeing.open_sequence()
    feed(seeing, waiting, [1])
    free_tokens = seeing.free_tokens()
    with pytest.raises(CacheFull):
        feed_image(seeing, waiting, [part for part in seeing.prepare_image(decoded("1")) if not isinstance(part, list)])
    assert (seeing.length(waiting), seeing.free_tokens()) == (1, free_tokens)
    for sequence in filling:
        seeing.free_sequence(sequence)
    row = feed(seeing, waiting, ["1", _A])

    assert is_equal(seeing, row, fresh(seeing, [1, "1", _A]))
    seeing.free_sequence(waiting)


def test_states_with_images_belong_to_their_projector(tmp_path: Path, seeing: LlamaCppRunner) -> None:
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


def test_an_aborted_image_leaves_nothing(tmp_path: Path) -> None:
    """The flag is set again and again, because a pass clears it when it begins."""
    runner = open_model(write_model(tmp_path, QWEN2VL), context=2048, n_batch=32, slots=1, max_sequences=2)
    sequence = runner.open_sequence()
    feed(runner, sequence, [1, _A])
    prepared = [part for part in runner.prepare_image(decoded("1", 480, 480)) if isinstance(part, MediaChunk)]
    is_over = threading.Event()

    def abort_on() -> None:
        while not is_over.is_set():
            runner.abort()

    thread = threading.Thread(target=abort_on)
    thread.start()
    try:
        with pytest.raises(StepAborted) as caught:
            feed_image(runner, sequence, prepared)
    finally:
        is_over.set()
        thread.join()
    row = feed(runner, sequence, [_B])

    assert caught.value.lengths == {sequence: 2}
    assert np.array_equal(row, fresh(runner, [1, _A, _B]))
    runner.close()
