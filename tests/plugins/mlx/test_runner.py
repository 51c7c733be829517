"""What the mlx runner promises beyond the contract: its thread, its memory, and which spans share a call."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_mlx.backend import MlxBackend, MlxOptions
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.runner import MlxRunner, groups_of
from enginehouse_testkit.server_thread import server_thread

pytestmark = pytest.mark.mlx

TinyModel = Callable[[str], Path]


def _open(path: Path) -> Any:
    options = MlxOptions(context=64, slots=4)
    return MlxBackend().open(ModelSource(str(path), path), options, lambda _share, _what: None)


def test_one_thread_loads_runs_and_frees(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a real server; the thread is the engine's own, not that of the event loop."""
    calls: dict[str, set[str]] = {}

    def watched(name: str) -> None:
        original = getattr(MlxRunner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.setdefault(name, set()).add(threading.current_thread().name)
            return original(*arguments, **named)

        monkeypatch.setattr(MlxRunner, name, call)

    for name in ("__init__", "open_sequence", "forward", "free_sequence", "fork", "truncate", "close"):
        watched(name)
    source = str(tiny_model("llama"))
    model = ModelSettings(source=source, backend="mlx", isolation="thread", context=64)
    with server_thread(Settings(models={"m": model}, plugins=PluginsSettings(allow=("mlx",)))) as running:
        body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 4, "n": 2}
        client = httpx.Client(base_url=running.url, timeout=60)
        with client:
            while client.get("/health").status_code != 200:
                threading.Event().wait(0.05)
            assert client.post("/v1/completions", json=body).status_code == 200

    assert {"__init__", "open_sequence", "forward", "close"} <= set(calls)
    assert set.union(*calls.values()) == {"engine"}


def test_logits_reach_the_host_without_a_copy(tiny_model: TinyModel) -> None:
    """Twice the same memory: what is written through one view is seen through the other."""
    runner = _open(tiny_model("llama"))
    output = runner.forward([Span(runner.open_sequence(), 0, np.arange(5, dtype=np.int32), "all")])
    first, second = output.host(), output.host()
    first[2, 3] = 1234.5

    assert not first.flags.owndata
    assert np.shares_memory(first, second)
    assert second[2, 3] == 1234.5
    runner.close()


def _num_operations(output: mx.array) -> int:
    """Number of operations that MLX runs for an array."""
    graph = io.StringIO()
    mx.export_to_dot(graph, output)
    return graph.getvalue().count("shape=rectangle")


@pytest.mark.parametrize(("starts", "extra_per_layer"), [((3,), 0), ((3, 2), 8)])
def test_a_step_has_few_operations_beside_those_with_the_models_own_cache(
    starts: tuple[int, ...], extra_per_layer: int, tiny_model: TinyModel
) -> None:
    """One sequence: none. Several: views for the scatter, which replaces mlx-lm's slice of padded rows."""
    runner = _open(tiny_model("llama"))
    model, memory = runner.model.model, runner.model.make_memory()
    own = make_prompt_cache(model) if len(starts) == 1 else [BatchKVCache([0] * len(starts)) for _ in model.layers]
    slots, prompt = tuple(range(len(starts))), mx.array([[1, 2, 3]] * len(starts))
    last = mx.array([[4]] * len(starts))
    mx.eval(model(prompt, memory.begin(Batch(slots, (0,) * len(starts), 3))), model(prompt, own))

    ours, theirs = model(last, memory.begin(Batch(slots, starts, 1))), model(last, own)

    assert _num_operations(ours) <= _num_operations(theirs) + extra_per_layer * len(model.layers)


def test_spans_of_unequal_length_give_the_rows_that_each_gives_alone(tiny_model: TinyModel) -> None:
    """Drafts of 1 to 5 tokens in one call; then each sequence is cut at another place and goes on."""
    for architecture in ("llama", "gemma3"):
        runner = _open(tiny_model(architecture))
        random = np.random.default_rng(3)
        prompts = [random.integers(10, 90, size).astype(np.int32) for size in (9, 14, 3, 11)]
        drafts = [random.integers(10, 90, size).astype(np.int32) for size in (5, 1, 4, 3)]
        sequences = [runner.open_sequence() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            runner.forward([Span(sequence, 0, prompt, "none")])
        together = runner.forward(
            [Span(s, len(p), d, "all") for s, p, d in zip(sequences, prompts, drafts, strict=True)]
        ).host()
        kept = [runner.truncate(s, len(p) + n) for s, p, n in zip(sequences, prompts, (2, 1, 0, 3), strict=True)]
        last = np.array([42], np.int32)
        after = runner.forward([Span(s, n, last) for s, n in zip(sequences, kept, strict=True)]).host()

        start = 0
        for i, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
            alone, again = runner.open_sequence(), runner.open_sequence()
            whole = np.concatenate([prompt, draft])
            expected = runner.forward([Span(alone, 0, whole, "all")]).host()[len(prompt) :]
            assert np.abs(together[start : start + len(draft)] - expected).max() < 1e-3
            cut = np.concatenate([whole[: kept[i]], last])
            assert np.abs(after[i] - runner.forward([Span(again, 0, cut)]).host()[0]).max() < 1e-3
            start += len(draft)
            runner.free_sequence(alone)
            runner.free_sequence(again)
        runner.close()


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([1, 1, 1], [[0, 1, 2]]),
        ([5, 1, 4, 3], [[0, 1, 2, 3]]),
        ([1, 16, 1, 1], [[0, 2, 3], [1]]),
        ([1, 300, 1, 300, 7], [[0, 2], [1, 3], [4]]),
        ([20, 21], [[0], [1]]),
    ],
)
def test_filling_up_costs_at_most_as_much_again(sizes: list[int], groups: list[list[int]]) -> None:
    assert sorted(groups_of(sizes)) == groups
