"""What the fake runner does beyond the runner contract (see contracts/test_backend.py): its text, its failures."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from enginehouse.contract.backend import Backend, ForwardOutput, ModelSource, Runner, Span, Tokenizer
from enginehouse.contract.errors import CacheFull, InvalidSpan, ModelLoadError, StepAborted
from enginehouse_testkit.fake_runner import FakeBackend, FakeFaults, FakeOptions, FakeRunner


def greedy_text(runner: FakeRunner, prompt: str, max_tokens: int) -> list[int]:
    sequence = runner.open_sequence()
    token_ids, answer = runner.tokenizer.encode(prompt, special=True), []
    while len(answer) < max_tokens:
        span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32))
        token_ids = [int(runner.forward([span]).host()[0].argmax())]
        answer += token_ids
        if answer[-1] in runner.tokenizer.end_token_ids:
            break
    return answer


def test_protocols_are_met():
    runner = FakeRunner()
    output = runner.forward([Span(runner.open_sequence(), 0, np.array([1], np.int32))])

    assert isinstance(runner, Runner)
    assert isinstance(runner.tokenizer, Tokenizer)
    assert isinstance(output, ForwardOutput)
    assert isinstance(FakeBackend(), Backend)


def test_greedy_texts_are_varied_valid_and_end_by_themselves():
    """Whole characters, though some are split over tokens; a few hundred tokens at most, seldom very few."""
    runner = FakeRunner(FakeOptions(max_sequences=64))
    answers = [greedy_text(runner, f"Tell me about {subject}", 1000) for subject in range(40)]
    texts = [b"".join(runner.tokenizer.token_bytes[token_id] for token_id in answer).decode() for answer in answers]
    lengths = sorted(len(answer) for answer in answers)

    assert len(set(texts)) == 40
    assert 20 < np.median(lengths) < 300
    assert lengths[4] > 5
    assert lengths[-1] < 1000
    assert max(text.count(text[:3]) for text in texts) < 20
    assert any(runner.tokenizer.token_bytes[token_id] == b"\xf0" for answer in answers for token_id in answer)


def test_every_earlier_token_matters():
    """A cache that loses or swaps a token anywhere is noticed."""
    runner = FakeRunner()

    def last_row(token_ids):
        sequence = runner.open_sequence()
        row = runner.forward([Span(sequence, 0, np.array(token_ids, np.int32))]).host()[0]
        runner.free_sequence(sequence)
        return row

    token_ids = runner.tokenizer.encode("a sequence is its token ids", special=False)
    expected = last_row(token_ids)
    for place in range(len(token_ids) - 1):
        swapped = token_ids.copy()
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        assert swapped == token_ids or not np.array_equal(last_row(swapped), expected)
        assert not np.array_equal(last_row(token_ids[:place] + token_ids[place + 1 :]), expected)


def test_sliding_window_forgets_and_says_so():
    """Short steps back are possible, longer ones lose everything."""
    runner = FakeRunner(FakeOptions(window=6, window_slack=2))
    sequence = runner.open_sequence()
    runner.forward([Span(sequence, 0, np.arange(20, dtype=np.int32))])

    assert runner.capabilities.truncate == "bounded"
    assert runner.truncate(sequence, 18) == 18
    assert runner.fork(sequence, 15)[1] == 0
    assert runner.truncate(sequence, 15) == 0
    assert runner.length(sequence) == 0


def test_shared_positions_count_once():
    runner = FakeRunner(FakeOptions(cache_tokens=30))
    source = runner.open_sequence()
    runner.forward([Span(source, 0, np.arange(20, dtype=np.int32))])
    copy, _ = runner.fork(source, 20)
    assert runner.free_tokens() == 10
    runner.forward([Span(copy, 20, np.arange(5, dtype=np.int32))])
    assert runner.free_tokens() == 5
    runner.free_sequence(source)
    assert runner.free_tokens() == 5
    runner.truncate(copy, 10)
    assert runner.free_tokens() == 20


def test_fork_by_copy_needs_room():
    runner = FakeRunner(FakeOptions(cache_tokens=30, fork="copy"))
    source = runner.open_sequence()
    runner.forward([Span(source, 0, np.arange(20, dtype=np.int32))])
    with pytest.raises(CacheFull) as caught:
        runner.fork(source, 20)

    assert (caught.value.needed, caught.value.free) == (20, 10)
    assert runner.fork(source, 10)[1] == 10


def test_abort_interrupts_a_slow_step():
    """What was appended by then stays, and the error says what that is."""
    runner = FakeRunner(FakeOptions(step_delay_s=0.2, vocab_size=50_000))
    one, two = runner.open_sequence(), runner.open_sequence()
    spans = [Span(sequence, 0, np.arange(5, dtype=np.int32)) for sequence in (one, two)]
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(runner.forward, spans)
        while runner.length(one) == 0:
            time.sleep(0.001)
        runner.abort()
    with pytest.raises(StepAborted) as caught:
        step.result()

    assert caught.value.lengths == {one: 5, two: 0}


def test_faults_happen_at_their_step_only():
    runner = FakeRunner(FakeOptions(faults=FakeFaults(raise_at_step=2, nan_at_step=3)))
    one, two = runner.open_sequence(), runner.open_sequence()

    def step():
        spans = [Span(sequence, runner.length(sequence), np.array([65], np.int32)) for sequence in (one, two)]
        return runner.forward(spans).host()

    assert np.isfinite(step()).all()
    with pytest.raises(RuntimeError, match="on purpose at step 2"):
        step()
    rows = step()
    assert np.isnan(rows[0]).all()
    assert np.isfinite(rows[1]).all()
    assert np.isfinite(step()).all()


def test_abort_fault_kills_the_process():
    code = (
        "import numpy as np, resource\n"
        "from enginehouse.contract.backend import Span\n"
        "from enginehouse_testkit.fake_runner import FakeFaults, FakeOptions, FakeRunner\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "runner = FakeRunner(FakeOptions(faults=FakeFaults(abort_at_step=1)))\n"
        "runner.forward([Span(runner.open_sequence(), 0, np.array([1], np.int32))])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)

    assert result.returncode == -signal.SIGABRT


def test_backend_opens_only_its_own_source():
    backend = FakeBackend()
    progress = []
    runner = backend.open(ModelSource("fake"), FakeOptions(context=99), lambda share, what: progress.append(share))

    assert backend.match(ModelSource("fake")).score == 1
    assert backend.match(ModelSource("other")).score == 0
    assert backend.estimate(ModelSource("fake"), FakeOptions()).total_bytes > 0
    assert backend.probe().available
    assert runner.capabilities.max_context == 99
    assert progress == sorted(progress)
    assert progress[-1] == 1


@pytest.mark.parametrize("options", [FakeOptions(faults=FakeFaults(refuse_to_open="no")), FakeOptions(vocab_size=9)])
def test_backend_refuses_to_open(options):
    with pytest.raises(ModelLoadError):
        FakeBackend().open(ModelSource("fake"), options, lambda share, what: None)


def test_negative_truncation_is_refused():
    runner = FakeRunner()
    with pytest.raises(InvalidSpan):
        runner.truncate(runner.open_sequence(), -1)
