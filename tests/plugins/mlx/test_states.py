"""Saved sequences: another runner goes on with equal logits, other data is refused, a restarted server finds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import InvalidSpan, StateRefused
from enginehouse.contract.saved_states import HEAD_BYTES, write_head
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_testkit.server_thread import server_thread

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(300)]

TinyModel = Callable[[str], Path]

_TOKENS = (np.arange(40, dtype=np.int32) * 31 + 5) % 90


@pytest.fixture
def open_runner(tiny_model: TinyModel) -> Iterator[Callable[..., Any]]:
    opened = []

    def open_one(name: str, **options: Any) -> Any:
        source = ModelSource(name, tiny_model(name))
        settings = MlxOptions(**{"slots": 2, "context": 64, **options})
        opened.append(MlxBackend().open(source, settings, lambda _share, _what: None))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()


def _feed(runner: Any, sequence: int, token_ids: np.ndarray) -> np.ndarray:
    rows: np.ndarray = runner.forward([Span(sequence, runner.length(sequence), token_ids, "all")]).host().copy()
    return rows


def _saved(runner: Any, token_ids: np.ndarray) -> tuple[int, memoryview]:
    sequence = runner.open_sequence()
    _feed(runner, sequence, token_ids)
    return sequence, runner.save(sequence)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"draws": "mlx"}], ids=["plain", "bfloat16", "draws"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_runner_goes_on_with_equal_logits(
    open_runner: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    """One that has computed nothing yet, as after a restart; far beyond Gemma's window of 8, and cut back."""
    first, second = open_runner(name, **options), open_runner(name, **options)
    sequence, data = _saved(first, _TOKENS[:30])
    loaded = second.load(memoryview(bytes(data)))  # as a file gives it, not writable
    assert second.length(loaded) == 30
    assert np.array_equal(_feed(second, loaded, _TOKENS[30:]), _feed(first, sequence, _TOKENS[30:]))
    for runner, one in ((first, sequence), (second, loaded)):
        assert runner.truncate(one, 12) == 12
    assert np.array_equal(_feed(second, loaded, _TOKENS[3:9]), _feed(first, sequence, _TOKENS[3:9]))


def test_it_is_loaded_beside_others(open_runner: Callable[..., Any]) -> None:
    """Into memory that must grow for it, and whose other slots stay what they were."""
    runner = open_runner("gemma3")
    _, data = _saved(runner, _TOKENS)
    other = runner.open_sequence()
    _feed(runner, other, _TOKENS[5:20])
    loaded = runner.load(data)
    alone = open_runner("gemma3")
    for sequence, held in ((loaded, _TOKENS), (other, _TOKENS[5:20])):
        expected = _feed(alone, alone.open_sequence(), np.concatenate([held, _TOKENS[:4]]))[-4:]
        assert np.abs(_feed(runner, sequence, _TOKENS[:4]) - expected).max() < 1e-3


def test_states_of_other_settings_are_refused(open_runner: Callable[..., Any]) -> None:
    """Another type, other layers: the head says so."""
    _, data = _saved(open_runner("llama"), _TOKENS)
    for name, options in (("llama", {"dtype": "bfloat16"}), ("gemma3", {})):
        with pytest.raises(StateRefused, match="other settings"):
            open_runner(name, **options).load(data)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 40 * 512 - 1, 40 * 512 + 1, 41 * 512])
def test_a_right_head_before_another_amount_of_data_is_refused(open_runner: Callable[..., Any], num_bytes: int) -> None:
    runner = open_runner("llama")
    assert _saved(runner, _TOKENS)[1].nbytes == HEAD_BYTES + 40 * 512  # 2 layers, keys and values, 2 heads of 16 floats
    data = memoryview(bytearray(HEAD_BYTES + num_bytes))
    write_head(data, runner.state_format, 40)
    free_tokens = runner.free_tokens()
    with pytest.raises(StateRefused):
        runner.load(data)

    assert runner.free_tokens() == free_tokens


def test_only_what_all_layers_have_computed_is_saved(open_runner: Callable[..., Any]) -> None:
    runner = open_runner("llama")
    sequence = runner.open_sequence()
    with pytest.raises(InvalidSpan, match="nothing"):
        runner.save(sequence)
    _feed(runner, sequence, _TOKENS[:5])
    runner.forward([Span(sequence, 5, _TOKENS[5:6], num_layers=1)])
    with pytest.raises(InvalidSpan, match="some layers"):
        runner.save(sequence)
    runner.truncate(sequence, 5)

    assert runner.length(runner.load(runner.save(sequence))) == 5


@contextmanager
def _served(folder: Path, states: Path) -> Iterator[httpx.Client]:
    model = ModelSettings(
        source=str(folder), backend="mlx", context=256, slots=2, isolation="thread", prefix_cache_dir=str(states)
    )
    with (
        server_thread(Settings(models={"m": model})) as server,
        httpx.Client(base_url=server.url, timeout=120, headers={"X-Enginehouse-Details": "true"}) as client,
    ):
        while client.get("/health").json()["status"] == "loading":
            time.sleep(0.05)
        yield client


def test_a_restarted_server_finds_its_prompts_on_the_disk(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The answer goes on from them, and is the same."""
    prompt = "Many people live there, in a land of mountains and stops. " * 6
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers = []
    for _ in range(2):
        with _served(tiny_model("gemma3"), tmp_path / "states") as client:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
    cold, found = answers

    assert cold["enginehouse"]["prefix_cache"]["loaded_tokens"] == 0
    assert found["enginehouse"]["prefix_cache"]["loaded_tokens"] >= 64
    assert found["choices"][0]["text"] == cold["choices"][0]["text"]
