"""Models with recurrent layers, and with attention sinks: greedy text of mlx-lm's own ``generate``, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError, StateRefused
from enginehouse_backendkit.saved_states import HEAD_BYTES, write_head
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.contract.opening import ModelUnderTest
from enginehouse_testkit.runner_contract import RunnerContract

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

Greedy = Callable[..., list[list[int]]]
RandomModel = Callable[..., Path]

_RECURRENT = (
    "qwen3_next",
    "qwen3_5",
    "mamba2",
    "lfm2",
    "jamba",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
)
_NUM_TOKENS = 12
_PROMPTS = [[(7 * number + 3 * which) % 90 + 5 for number in range(length)] for which, length in enumerate((17, 5, 30))]


def _open(path: Path, **options: Any) -> Any:
    settings = MlxOptions(**{"context": 64, "slots": 4, **options})
    return MlxBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)


def _generate(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What mlx-lm itself generates, prompt by prompt, with its own caches."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model: Any = load(str(folder))[0]
    answers = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=_NUM_TOKENS, prefill_step_size=7)
        answers.append([int(token) for token, _ in steps])
    return answers


def _append(runner: Any, sequence: int, token_ids: Sequence[int]) -> int:
    """Append tokens; return the most probable next one."""
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32))
    return int(runner.forward([span]).host()[0].argmax())


def _continue(runner: Any, sequence: int, token_ids: Sequence[int], num_tokens: int = _NUM_TOKENS) -> list[int]:
    answer = [_append(runner, sequence, token_ids)]
    while len(answer) < num_tokens:
        answer.append(_append(runner, sequence, answer[-1:]))
    return answer


@pytest.fixture(scope="module", params=["gpt_oss", *_RECURRENT])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(random_model: RandomModel, family: str) -> list[list[int]]:
    return _generate(random_model(family), _PROMPTS)


@pytest.fixture(scope="module")
def runner(random_model: RandomModel, family: str) -> Iterator[Any]:
    opened = _open(random_model(family))
    yield opened
    opened.close()


def test_greedy_text_is_that_of_mlx_lm(runner: Any, expected: list[list[int]], greedy: Greedy) -> None:
    """Alone, batched, and in chunks beside sequences that decode."""
    assert [greedy(runner, [prompt], _NUM_TOKENS, chunk_tokens=64)[0] for prompt in _PROMPTS] == expected
    assert greedy(runner, _PROMPTS, _NUM_TOKENS, chunk_tokens=64) == expected
    assert greedy(runner, _PROMPTS, _NUM_TOKENS, chunk_tokens=7) == expected


def test_greedy_text_after_going_back_and_forking(runner: Any, expected: list[list[int]]) -> None:
    """From inside an answer back to the prompt's checkpoint; a fork of an end and one of a checkpoint."""
    prompt, answer = _PROMPTS[0], expected[0]
    sequence = runner.open_sequence()
    _append(runner, sequence, prompt[:-1])
    runner.keep_checkpoint(sequence)
    assert _continue(runner, sequence, prompt[-1:]) == answer
    runner.truncate(sequence, len(prompt) - 1)
    assert runner.length(sequence) == len(prompt) - 1
    assert _continue(runner, sequence, prompt[-1:], 6) == answer[:6]

    whole, held = runner.fork(sequence, runner.length(sequence))
    begun, kept = runner.fork(sequence, len(prompt) - 1)
    assert (held, kept) == (len(prompt) + 5, len(prompt) - 1)
    assert _continue(runner, whole, answer[5:6], 6) == answer[6:]
    assert _continue(runner, sequence, answer[5:6], 6) == answer[6:]
    assert _continue(runner, begun, prompt[-1:]) == answer
    for one in (sequence, whole, begun):
        runner.free_sequence(one)


def test_the_memory_estimate_counts_states(random_model: RandomModel, family: str) -> None:
    source = ModelSource(family, random_model(family))
    few, many = (MlxBackend().estimate(source, MlxOptions(checkpoints=number)) for number in (1, 32))
    assert (many.total_bytes > few.total_bytes) == (family in _RECURRENT)


@pytest.fixture(scope="module")
def saved(random_model: RandomModel) -> Iterator[tuple[Any, bytes]]:
    """A runner, and a sequence of 12 tokens that it saved, with checkpoints at 4 and 9."""
    opened = _open(random_model("qwen3_next"), draws="mlx")
    sequence = opened.open_sequence()
    for start, end in ((0, 4), (4, 9), (9, 12)):
        _append(opened, sequence, _PROMPTS[0][start:end])
        if end < 12:
            opened.keep_checkpoint(sequence)
    yield opened, bytes(opened.save(sequence))
    opened.close()


def test_a_saved_sequence_goes_on_in_another_runner(random_model: RandomModel, saved: tuple[Any, bytes]) -> None:
    """Also from its checkpoints."""
    other = _open(random_model("qwen3_next"), draws="core")
    expected = _generate(random_model("qwen3_next"), _PROMPTS[:1])[0]
    loaded = other.load(memoryview(saved[1]))
    assert _continue(other, loaded, _PROMPTS[0][12:]) == expected
    for length, kept in ((11, 9), (8, 4)):
        assert other.truncate(loaded, length) == kept
        assert _continue(other, loaded, _PROMPTS[0][kept:]) == expected
    other.close()


@pytest.mark.parametrize("lengths", [(0, 9), (9, 4), (4, 4), (4, 13), (2**32 - 1, 9)])
def test_wrong_lengths_of_checkpoints_are_refused(saved: tuple[Any, bytes], lengths: tuple[int, int]) -> None:
    runner, data = saved[0], bytearray(saved[1])
    words = np.array([2, 4, 9], "<u4").tobytes()
    assert data.count(words) == 1
    data = data.replace(words, np.array([2, *lengths], "<u4").tobytes())
    write_head(memoryview(data), runner.state_format, 12)
    free_tokens = runner.free_tokens()
    with pytest.raises(StateRefused, match="lengths"):
        runner.load(memoryview(data))

    assert runner.free_tokens() == free_tokens


@pytest.mark.parametrize("num_lengths", [0, 1, 3, 2**31])
def test_another_number_of_checkpoints_is_refused(saved: tuple[Any, bytes], num_lengths: int) -> None:
    runner, data = saved[0], bytearray(saved[1])
    start = data.index(np.array([2, 4, 9], "<u4").tobytes(), HEAD_BYTES)
    data[start : start + 4] = np.array([num_lengths], "<u4").tobytes()
    write_head(memoryview(data), runner.state_format, 12)
    with pytest.raises(StateRefused):
        runner.load(memoryview(data))


def test_an_idle_sequence_keeps_no_states_of_others() -> None:
    """Nor does one that was in a batch with them until one of them was freed."""
    import mlx.core as mx

    from enginehouse_mlx.batch import Batch
    from enginehouse_mlx.recurrent import StateCache

    cache, before = StateCache(1), mx.get_active_memory()
    for slots, start in ((tuple(range(20)), 0), ((19,), 1)):
        cache.begin_pass()
        cache.begin(Batch(slots, (start,) * len(slots), 1))
        cache[0] = mx.ones((20, 65536)) if cache[0] is None else cache[0] + 1
        mx.eval(cache.arrays)
        for slot in range(16):
            cache.write(slot, None)
    mx.synchronize()

    assert mx.get_active_memory() - before < 5 * 4 * 65536, "there are 4 sequences"


def test_exits_are_refused_with_their_reason(random_model: RandomModel) -> None:
    runner = _open(random_model("lfm2"), draws="core")
    assert runner.capabilities.exit_layers == ()
    with pytest.raises(ModelLoadError, match="keep states"):
        runner.use_exit_policy(object())
    runner.close()


class TestContract(RunnerContract):
    """Attention with short convolutions; checkpoints at any place."""

    max_logit_difference = 1e-3
    num_random_steps = 30

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, random_model: RandomModel) -> ModelUnderTest:
        path = random_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
        options = MlxOptions(context=64, slots=4, max_batch_tokens=128)
        return ModelUnderTest(backend=MlxBackend(), source=ModelSource(str(path), path), options=options)
