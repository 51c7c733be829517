"""Saved sequences: equal logits in another runner, foreign ones refused, and prompts found after a restart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import InvalidSpan, StateRefused
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.runner import HfRunner
from enginehouse_testkit.server_thread import server_thread

pytestmark = pytest.mark.hf

TinyModel = Callable[[str], Path]
TOKEN_IDS = [(7 * number) % 90 + 5 for number in range(40)]


def open_runner(path: Path, **options: Any) -> HfRunner:
    settings = HfOptions(**{"device": "cpu", "context": 64, "slots": 2, "threads": 1, **options})
    runner = HfBackend().open(ModelSource(str(path), path), settings, lambda _share, _what: None)
    assert isinstance(runner, HfRunner)
    return runner


def feed(runner: HfRunner, sequence: int, token_ids: list[int], num_layers: int | None = None) -> np.ndarray:
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), "all", num_layers)
    return runner.forward([span]).host()


def holding(runner: HfRunner, token_ids: list[int]) -> int:
    sequence = runner.open_sequence()
    feed(runner, sequence, token_ids)
    return sequence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_another_runner_goes_on_with_equal_logits(tiny_model: TinyModel, architecture: str, dtype: str) -> None:
    """As after a restart: loading is the first that it does, from memory that may not be written to."""
    first, second = (open_runner(tiny_model(architecture), dtype=dtype) for _ in range(2))
    saved = holding(first, TOKEN_IDS)
    data = first.save(saved)
    loaded = second.load(memoryview(bytes(data)))

    assert second.length(loaded) == len(TOKEN_IDS)
    for token_ids in ([5], [6, 7, 8]):
        assert np.array_equal(feed(second, loaded, token_ids), feed(first, saved, token_ids))


def test_a_sequence_is_loaded_beside_others(tiny_model: TinyModel) -> None:
    """Into whichever slot is free; what other slots hold stays as it is."""
    runner = open_runner(tiny_model("llama"))
    kept = holding(runner, TOKEN_IDS[:20])
    data = runner.save(kept)
    other = holding(runner, TOKEN_IDS[20:])
    loaded = runner.load(data)
    expected = feed(runner, kept, [9])

    assert np.allclose(feed(runner, loaded, [9]), expected, atol=1e-5)
    assert np.allclose(feed(runner, other, [9]), feed(runner, holding(runner, TOKEN_IDS[20:]), [9]), atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {"dtype": "bfloat16"}), ("qwen3", {}), ("gemma3", {})],
)
def test_states_of_other_settings_and_models_are_refused(
    tiny_model: TinyModel, architecture: str, options: dict[str, Any]
) -> None:
    runner = open_runner(tiny_model("llama"))
    data = runner.save(holding(runner, TOKEN_IDS))
    other = open_runner(tiny_model(architecture), **options)
    with pytest.raises(StateRefused, match="other settings"):
        other.load(data)


def test_a_state_that_is_longer_than_the_context_is_refused(tiny_model: TinyModel) -> None:
    runner, short = open_runner(tiny_model("llama")), open_runner(tiny_model("llama"), context=32)
    data = runner.save(holding(runner, TOKEN_IDS))
    with pytest.raises(StateRefused, match="the context is 32"):
        short.load(data)


def test_only_whole_sequences_are_saved(tiny_model: TinyModel) -> None:
    """The upper layers know nothing of tokens that left before them."""
    runner = open_runner(tiny_model("llama"))
    sequence = runner.open_sequence()
    with pytest.raises(InvalidSpan):
        runner.save(sequence)
    feed(runner, sequence, [5, 6], num_layers=1)
    with pytest.raises(InvalidSpan):
        runner.save(sequence)


def test_models_whose_weights_are_drawn_keep_no_states(tiny_model: TinyModel) -> None:
    """The next process draws others."""
    assert not open_runner(tiny_model("llama"), random_weights=True).capabilities.states


@contextlib.contextmanager
def serving(path: Path, folder: Path) -> Iterator[httpx.Client]:
    options = {"device": "cpu", "threads": 1}
    model = ModelSettings(
        source=str(path), backend="hf", isolation="thread", context=256, prefix_cache_dir=str(folder), options=options
    )
    with server_thread(Settings(models={"m": model})) as running, httpx.Client(base_url=running.url) as client:
        deadline = time.monotonic() + 60
        while client.get("/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield client


def ask(client: httpx.Client, prompt: list[int]) -> tuple[str, int, int]:
    """The text, and how many tokens of the prompt were cached, and loaded."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"x-enginehouse-details": "true"}
    answer = client.post("/v1/completions", json=body, headers=headers, timeout=60).raise_for_status().json()
    num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], num_cached, answer["enginehouse"]["prefix_cache"]["loaded_tokens"]


def test_a_server_finds_its_prompts_after_a_restart(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Whole and in part, with the same answers."""
    path = tiny_model("gemma3")
    whole, part = (TOKEN_IDS * 4)[:150], [*(TOKEN_IDS * 4)[:100], 3, 4, 5]
    with serving(path, tmp_path / "one") as client:
        first = ask(client, whole)
    with serving(path, tmp_path / "other") as client:
        of_part = ask(client, part)
    with serving(path, tmp_path / "one") as client:
        again, again_of_part = ask(client, whole), ask(client, part)

    assert first[1:] == of_part[1:] == (0, 0)
    assert again == (first[0], 149, 149)
    assert again_of_part == (of_part[0], 100, 0), "by then it is in memory"
