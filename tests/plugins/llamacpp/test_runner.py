"""What the contract suite cannot know: llama.cpp's dangers, loading, closing, and the answers of real models."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from enginehouse.contract.backend import Outputs, Span
from enginehouse.contract.errors import InvalidSpan, ModelLoadError, StepAborted
from enginehouse_llamacpp.runner import LlamaCppRunner

pytestmark = pytest.mark.llamacpp

Open = Callable[..., LlamaCppRunner]

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def feed(runner: LlamaCppRunner, sequence: int, token_ids: list[int], outputs: Outputs = "last") -> np.ndarray:
    """Append ids; a copy of the rows."""
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), outputs)
    return runner.forward([span]).host().copy()


def greedy(runner: LlamaCppRunner, token_ids: list[int], max_tokens: int) -> bytes:
    """The most probable answer up to an end token."""
    sequence = runner.open_sequence()
    answer: list[int] = []
    next_ids = token_ids
    while len(answer) < max_tokens:
        next_id = int(feed(runner, sequence, next_ids)[-1].argmax())
        if next_id in runner.tokenizer.end_token_ids:
            break
        answer.append(next_id)
        next_ids = [next_id]
    runner.free_sequence(sequence)
    return b"".join(runner.tokenizer.token_bytes[token_id] for token_id in answer)


@pytest.fixture
def sequence(smollm: LlamaCppRunner) -> Iterator[int]:
    """An empty sequence of SmolLM2."""
    opened = smollm.open_sequence()
    yield opened
    smollm.free_sequence(opened)


def test_smollm_knows_the_capital_of_france(smollm: LlamaCppRunner) -> None:
    assert greedy(smollm, smollm.tokenizer.encode(QUESTION, True), 16) == b"The capital of France is Paris."


def test_gemma_continues_a_text(gemma: LlamaCppRunner) -> None:
    """A base-like model without a chat template: raw text after BOS."""
    prompt = [*gemma.tokenizer.prefix_token_ids, *gemma.tokenizer.encode("Roses are red, violets are", False)]

    assert greedy(gemma, prompt, 3).startswith(b" blue")


def test_info_says_what_the_model_is(smollm: LlamaCppRunner, gemma: LlamaCppRunner) -> None:
    assert smollm.info.metadata["architecture"] == "llama"
    assert smollm.info.metadata["quantization"] == "Q4_1"
    assert smollm.info.metadata["parameters"] == "134515008"
    assert "<|im_start|>" in smollm.info.chat_templates["default"]
    assert smollm.info.special_tokens["<|im_end|>"] in smollm.tokenizer.end_token_ids
    assert (smollm.info.bos_token, smollm.info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert gemma.info.chat_templates == {}
    assert gemma.tokenizer.prefix_token_ids == (gemma.info.special_tokens["<bos>"],)
    assert gemma.info.vocab_size == 262_144


def test_rows_are_llama_cpps_own_memory(smollm: LlamaCppRunner, sequence: int) -> None:
    """Nothing is copied, and callers may write."""
    rows = smollm.forward([Span(sequence, 0, np.array([1, 2, 3], np.int32), "all")]).host()
    assert not rows.flags.owndata
    rows[0] = 0.0

    assert rows.shape == (3, smollm.info.vocab_size)


@pytest.mark.parametrize("types", [("f16", "f32"), ("f32", "f16"), ("f32", None)])
def test_rows_depend_on_chunks_only_where_the_runner_says_so(
    smollm_path: Path, open_runner: Open, types: tuple[str, str | None]
) -> None:
    """llama.cpp computes f32 as f16, and two of a kind with another kernel where a chunk is long."""
    type_k, type_v = types
    runner = open_runner(smollm_path, context=256, cache_tokens=512, threads=2, type_k=type_k, type_v=type_v)
    rows = []
    for chunk_tokens in (160, 20):
        sequence = runner.open_sequence()
        for start in range(0, 160, chunk_tokens):
            last = feed(runner, sequence, list(range(1000 + start, 1000 + start + chunk_tokens)))
        rows.append(last)
    is_invariant = runner.capabilities.batch_invariant
    runner.close()

    assert is_invariant == np.array_equal(*rows) == (type_v is None)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64, 100, 160])
def test_smollm_rows_do_not_depend_on_chunks(smollm: LlamaCppRunner, sequence: int, chunk_tokens: int) -> None:
    """Also where llama.cpp has another attention kernel for long chunks (64 and more rows)."""
    token_ids = list(range(1000, 1180 if chunk_tokens >= 64 else 1060))
    other = smollm.open_sequence()
    expected = feed(smollm, other, token_ids, "all")[-20:]
    smollm.free_sequence(other)
    cut = len(token_ids) - 20
    for start in range(0, cut, chunk_tokens):
        feed(smollm, sequence, token_ids[start : min(start + chunk_tokens, cut)], "none")

    assert np.array_equal(feed(smollm, sequence, token_ids[cut:], "all"), expected)


def test_smollm_rows_do_not_depend_on_threads(smollm_path: Path, open_runner: Open) -> None:
    """Threads change while streams run; also past 256 cells, where llama.cpp could split one token's attention."""
    rows = []
    for threads in (1, 3):
        runner = open_runner(smollm_path, threads=threads, context=512, cache_tokens=512)
        handle = runner.open_sequence()
        feed(runner, handle, list(range(2000, 2280)), "none")
        rows.append(feed(runner, handle, [7]))
        runner.close()

    assert np.array_equal(rows[0], rows[1])


def test_abort_ends_a_long_prefill_early(smollm: LlamaCppRunner, sequence: int) -> None:
    """And the same tokens can be fed again. Aborts that come before the pass have no effect, so there are many."""
    token_ids = list(range(3000, 3200))
    expected = feed(smollm, sequence, token_ids)
    smollm.truncate(sequence, 0)
    is_over = threading.Event()

    def abort() -> None:
        while not is_over.wait(0.01):
            smollm.abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        with pytest.raises(StepAborted) as caught:
            feed(smollm, sequence, token_ids)
    finally:
        is_over.set()
        aborting.join()

    assert caught.value.lengths == {sequence: smollm.length(sequence)}
    length = smollm.length(sequence)
    assert length < len(token_ids)
    assert np.array_equal(feed(smollm, sequence, token_ids[length:]), expected)


def test_abort_without_a_forward_pass_has_no_effect(smollm: LlamaCppRunner, sequence: int) -> None:
    smollm.abort()

    assert feed(smollm, sequence, [1]).shape[0] == 1


def test_wrong_input_types_are_refused(smollm: LlamaCppRunner, sequence: int) -> None:
    """What numpy would convert silently."""
    for wrong in (np.array([1], np.int64), np.array([[1]], np.int32), [1], None):
        with pytest.raises(InvalidSpan):
            smollm.forward([Span(sequence, 0, wrong)])  # type: ignore[arg-type]
    with pytest.raises(InvalidSpan):
        smollm.forward([])


_DANGERS = """
import sys
from pathlib import Path
import numpy as np
from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import CacheFull, InvalidSpan
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions

path = Path(sys.argv[1])
options = LlamaCppOptions(context=256, cache_tokens=256, slots=2, max_sequences=4, n_batch=64, threads=1)
runner = LlamaCppBackend().open(ModelSource("m", path), options, lambda share, what: None)
sequence = runner.open_sequence()
ids = lambda count: np.zeros(count, np.int32)
for span in (
    Span(sequence, 0, ids(65)), Span(sequence, 0, ids(100_000)), Span(sequence, 1, ids(1)), Span(sequence, -1, ids(1)),
    Span(99, 0, ids(1)), Span(-1, 0, ids(1)), Span(2**31, 0, ids(1)), Span(sequence, 0, ids(0)),
    Span(sequence, 0, ids(1) - 1), Span(sequence, 0, ids(1) + 2**30), Span(sequence, 0, ids(1), "some"),
    Span(sequence, 0, ids(1), "last", 3),
):
    try:
        runner.forward([span])
    except InvalidSpan:
        continue
    sys.exit(f"not refused: {span}")
cut = lambda handle: runner.truncate(handle, 1)
copy = lambda handle: runner.fork(handle, 1)
for call in (runner.free_sequence, runner.length, cut, copy):
    for handle in (99, -1, 2**40):
        try:
            call(handle)
        except InvalidSpan:
            continue
        sys.exit(f"not refused: {call} {handle}")
others = [runner.open_sequence() for _ in range(3)]
try:
    runner.fork(sequence, 0)
    sys.exit("one sequence too many")
except CacheFull:
    pass
print(runner.forward([Span(sequence, 0, ids(3))]).host().shape)
runner.close()
"""


def test_nothing_that_is_refused_ends_the_process(smollm_path: Path) -> None:
    """llama.cpp would abort on several of these; the process that tries them all goes on and computes."""
    done = subprocess.run(
        [sys.executable, "-c", _DANGERS, str(smollm_path)], capture_output=True, text=True, timeout=100, check=False
    )

    assert (done.returncode, done.stdout) == (0, "(1, 49152)\n"), done.stderr


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "garbage", "cut in metadata", "cut in weights"])
def test_bad_files_are_load_errors(tmp_path: Path, smollm_path: Path, open_runner: Open, kind: str) -> None:
    """Each says which file, and why."""
    path = tmp_path / "bad.gguf"
    with smollm_path.open("rb") as file:
        head = file.read(40_000_000 if kind == "cut in weights" else 5_000)
    contents = {"empty": b"", "text": b"not a model", "garbage": b"GGUF" + bytes(range(200)) * 50}
    if kind != "missing":
        path.write_bytes(contents.get(kind, head))
    with pytest.raises(ModelLoadError, match=r"bad\.gguf: .+"):
        open_runner(path)


def test_failed_progress_ends_the_loading(smollm_path: Path) -> None:
    """An exception from the caller's progress function comes out; nothing stays loaded."""
    from enginehouse.contract.backend import ModelSource
    from enginehouse_llamacpp.backend import LlamaCppBackend
    from enginehouse_llamacpp.options import LlamaCppOptions

    def stop(_share: float, _what: str) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        LlamaCppBackend().open(ModelSource("m", smollm_path), LlamaCppOptions(), stop)


def test_progress_grows_to_one(smollm_path: Path) -> None:
    from enginehouse.contract.backend import ModelSource
    from enginehouse_llamacpp.backend import LlamaCppBackend
    from enginehouse_llamacpp.options import LlamaCppOptions

    seen: list[tuple[float, str]] = []
    options = LlamaCppOptions(cache_tokens=256, context=256, threads=1)
    LlamaCppBackend().open(ModelSource("m", smollm_path), options, lambda *step: seen.append(step)).close()
    shares = [share for share, _ in seen]

    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 5


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("num_runners", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_closing_frees_everything(smollm_path: Path, open_runner: Open, num_runners: int) -> None:
    """Many runners one after the other need no more memory than a few; one context alone has over 10 MB."""
    sizes = []
    for _ in range(num_runners):
        runner = open_runner(smollm_path, context=256, cache_tokens=256, slots=1, max_sequences=2, threads=1)
        feed(runner, runner.open_sequence(), [1, 2, 3])
        runner.close()
        sizes.append(_resident_bytes())
    gc.collect()

    assert sizes[-1] - sizes[4] < 20 * 2**20


def test_window_that_was_overwritten_is_not_reused(gemma_path: Path, open_runner: Open) -> None:
    """With window-only layers a cut that needs lost positions keeps nothing, rather than wrong attention."""
    runner = open_runner(
        gemma_path, context=1024, cache_tokens=2048, slots=1, max_sequences=2, n_batch=256, threads=2, swa_full=False
    )
    first, second = runner.open_sequence(), runner.open_sequence()  # 1440 tokens; the window cache has 1280
    for start in range(0, 720, 240):
        for handle in (first, second):
            feed(runner, handle, list(range(5000 + start, 5240 + start)), "none")
    planned = [runner.kept_length(first, length) for length in (300, 719, 720, 900)]
    kept = runner.truncate(first, 300)
    length = runner.length(first)
    runner.free_sequence(first)
    cut, shared_by_cut = runner.fork(second, 719)
    runner.free_sequence(cut)
    copy, shared = runner.fork(second, 720)
    rows = feed(runner, copy, [5720])
    runner.free_sequence(copy)
    expected = feed(runner, second, [5720])
    runner.close()

    assert planned == [0, 719, 720, 720], "what cuts will keep is known beforehand"
    assert (kept, length, shared_by_cut, shared) == (0, 0, 719, 720)
    assert np.abs(rows - expected).max() == 0.0
