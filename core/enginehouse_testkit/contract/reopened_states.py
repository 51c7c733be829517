"""Contract of saved sequences over several runners of one model: what a restarted worker finds of its prefix cache.

For backends that read model folders. Complements :class:`enginehouse_testkit.contract.states.StateContract`, which has
one runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from attrs import Attribute, asdict

from enginehouse.contract.backend import Backend, ModelSource, Span
from enginehouse.contract.errors import InvalidSpan, StateRefused
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_testkit.contract.driver import Rows
from enginehouse_testkit.served import served

__all__ = ["OpenRunner", "ReopenedStatesContract"]

_TOKEN_IDS = [(7 * number) % 90 + 5 for number in range(40)]

OpenRunner = Callable[..., Any]


class ReopenedStatesContract:
    """Needs the fixture ``folder``: the folder of a model by its architecture's name, ``llama`` or ``gemma3``.

    Attributes:
        backend: opens runners that save sequences.
        options: settings of each runner.
        more_options: further options with which a loaded sequence must go on as the saved one does.
    """

    backend: Backend
    options: Any
    more_options: Sequence[dict[str, Any]] = ()

    @pytest.fixture
    def open_runner(self, folder: Callable[[str], Path]) -> Iterator[OpenRunner]:
        """A function that opens a runner, given an architecture and other options; all are closed."""
        opened: list[Any] = []

        def open_one(name: str = "llama", **options: Any) -> Any:
            settings = type(self.options)(**{**asdict(self.options, recurse=False), **options})
            source = ModelSource(name, folder(name))
            opened.append(self.backend.open(source, settings, lambda _share, _what: None))
            return opened[-1]

        yield open_one
        for runner in opened:
            runner.close()

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_another_runner_goes_on_with_equal_logits(self, open_runner: OpenRunner, name: str) -> None:
        """One that has computed nothing yet; far beyond Gemma's window of 8, and cut back."""
        for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, *self.more_options):
            first, second = open_runner(name, **options), open_runner(name, **options)
            saved = _holding(first, _TOKEN_IDS[:30])
            loaded = second.load(memoryview(bytes(first.save(saved))))  # as a file gives it, not writable

            assert second.length(loaded) == 30
            assert np.array_equal(_feed(second, loaded, _TOKEN_IDS[30:]), _feed(first, saved, _TOKEN_IDS[30:])), options
            assert first.truncate(saved, 12) == second.truncate(loaded, 12)
            assert np.array_equal(_feed(second, loaded, _TOKEN_IDS[3:9]), _feed(first, saved, _TOKEN_IDS[3:9])), options

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_a_sequence_is_loaded_beside_others(self, open_runner: OpenRunner, name: str) -> None:
        """Into whichever slot is free; the other slots do not change."""
        runner, alone = open_runner(name), open_runner(name)
        data = runner.save(_holding(runner, _TOKEN_IDS))
        other = _holding(runner, _TOKEN_IDS[5:20])
        loaded = runner.load(data)

        for sequence, held in ((loaded, _TOKEN_IDS), (other, _TOKEN_IDS[5:20])):
            expected = _feed(alone, alone.open_sequence(), held + _TOKEN_IDS[:4])[-4:]
            assert np.abs(_feed(runner, sequence, _TOKEN_IDS[:4]) - expected).max() < 1e-3

    @pytest.mark.parametrize(
        ("name", "options"), [("llama", {"dtype": "bfloat16"}), ("qwen3", {}), ("gemma3", {})], ids=str
    )
    def test_states_of_other_settings_and_models_are_refused(
        self, open_runner: OpenRunner, name: str, options: dict[str, Any]
    ) -> None:
        """The head of the data names them."""
        runner = open_runner()
        data = runner.save(_holding(runner, _TOKEN_IDS))
        with pytest.raises(StateRefused, match="other settings"):
            open_runner(name, **options).load(data)

    def test_a_state_that_is_longer_than_the_context_is_refused(self, open_runner: OpenRunner) -> None:
        """The context may have been made shorter."""
        runner = open_runner()
        data = runner.save(_holding(runner, _TOKEN_IDS))
        with pytest.raises(StateRefused, match="the context is 32"):
            open_runner(context=32).load(data)

    def test_only_what_all_layers_have_computed_is_saved(self, open_runner: OpenRunner) -> None:
        """The upper layers have not seen tokens that left before them."""
        runner = open_runner()
        sequence = runner.open_sequence()
        with pytest.raises(InvalidSpan, match="nothing"):
            runner.save(sequence)
        _feed(runner, sequence, _TOKEN_IDS[:5])
        _feed(runner, sequence, _TOKEN_IDS[5:6], num_layers=1)
        with pytest.raises(InvalidSpan, match="some layers"):
            runner.save(sequence)
        runner.truncate(sequence, 5)

        assert runner.length(runner.load(runner.save(sequence))) == 5

    def test_a_server_finds_its_prompts_after_a_restart(self, folder: Callable[[str], Path], tmp_path: Path) -> None:
        """Whole and in part, with the same answers."""
        whole, part = (_TOKEN_IDS * 4)[:150], [*(_TOKEN_IDS * 4)[:100], 3, 4, 5]
        with self._serving(folder("gemma3"), tmp_path / "one") as client:
            first = _ask(client, whole)
        with self._serving(folder("gemma3"), tmp_path / "other") as client:
            of_part = _ask(client, part)
        with self._serving(folder("gemma3"), tmp_path / "one") as client:
            again, again_of_part = _ask(client, whole), _ask(client, part)

        assert first[1:] == of_part[1:] == (0, 0)
        assert again == (first[0], 149, 149)
        assert again_of_part == (of_part[0], 100, 0), "by then it is in memory"

    def _serving(self, path: Path, states: Path) -> AbstractContextManager[httpx.Client]:
        written = asdict(self.options, recurse=False, value_serializer=_as_in_a_file)
        options = {**written, "context": 256}
        model = ModelSettings(
            source=str(path),
            backend=self.backend.name,
            isolation="thread",
            prefix_cache_dir=str(states),
            options={name: value for name, value in options.items() if value is not None},
        )
        return served(Settings(models={"m": model}), timeout=120, headers={"X-Enginehouse-Details": "true"})


def _feed(runner: Any, sequence: int, token_ids: list[int], num_layers: int | None = None) -> Rows:
    """Return the rows of all tokens."""
    span = Span(sequence, runner.length(sequence), np.array(token_ids, np.int32), "all", num_layers)
    rows: Rows = runner.forward([span]).host().copy()
    return rows


def _holding(runner: Any, token_ids: list[int]) -> int:
    sequence: int = runner.open_sequence()
    _feed(runner, sequence, token_ids)
    return sequence


def _ask(client: httpx.Client, prompt: list[int]) -> tuple[str, int, int]:
    """Return the text, and the numbers of prompt tokens that were cached, and loaded."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], num_cached, answer["enginehouse"]["prefix_cache"]["loaded_tokens"]


def _as_in_a_file(_: type, __: Attribute[Any], value: Any) -> Any:
    """Return an option as TOML gives it."""
    return list(value) if isinstance(value, tuple) else value
