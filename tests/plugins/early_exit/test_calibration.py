"""Calibration: what is measured is what the runner does, and the setting that pays is the one that is printed."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from enginehouse.cli import main
from enginehouse.contract.backend import Span
from enginehouse.settings.config import load_settings
from enginehouse_early_exit.calibration import THRESHOLDS, Measured, Setting, calibrate, grid, passages
from enginehouse_early_exit.command import best_setting
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

_TEXT = "one two three, " * 40


def parts_of(text: str = _TEXT, most: int = 3) -> list[np.ndarray]:
    return passages([ord(character) for character in text], 6, 20, most)


def test_passages_are_equally_long_and_spread_over_the_text() -> None:
    token_ids = list(range(1000))

    assert [part.tolist() for part in passages(token_ids[:25], 6, 3, 9)] == [list(range(10)), list(range(10, 20))]
    assert [int(part[0]) for part in passages(token_ids, 6, 3, 4)] == [0, 250, 500, 750]
    assert passages(token_ids[:9], 6, 3, 4) == []


def test_every_policy_is_tried_behind_every_layer() -> None:
    found = grid([4, 6], tuple(THRESHOLDS))

    assert len(set(found)) == len(found) == 2 * sum(map(len, THRESHOLDS.values()))
    assert {one.layer for one in found} == {4, 6}


def test_what_is_measured_is_what_happened() -> None:
    """A threshold that all pass, and one that none does."""
    runner = FakeRunner(FakeOptions(num_layers=8))
    always, never = (Setting(policy="margin", layer=2, threshold=threshold) for threshold in (0.0, 1.0))
    plain, (left, stayed) = calibrate(runner, parts_of(), 6, [always, never])

    assert plain.num_tokens == left.num_tokens == stayed.num_tokens == 60
    assert (plain.agreement, plain.share_left, plain.mean_layers) == (1.0, 0.0, 8.0)
    assert (left.share_left, left.mean_layers) == (1.0, 2.0)
    assert left.agreement < 1.0
    assert left.perplexity != plain.perplexity
    assert (stayed.agreement, stayed.share_left, stayed.mean_layers) == (1.0, 0.0, 8.0)
    assert stayed.perplexity == pytest.approx(plain.perplexity)
    assert len(left.seconds) == len(left.plain_seconds) == 3
    assert len(stayed.plain_seconds) == len(plain.seconds) == 3
    assert left.tokens_per_s > 0
    assert runner.free_tokens() == runner.capabilities.cache_tokens


def test_perplexity_is_that_of_the_text() -> None:
    """Against rows of a plain pass."""
    runner = FakeRunner(FakeOptions(num_layers=8))
    (part,) = parts_of(most=1)
    plain, _ = calibrate(runner, [part], 6, [])
    prefix = np.array(runner.tokenizer.prefix_token_ids, np.int32)
    whole = np.concatenate([prefix, part])
    rows = runner.forward([Span(runner.open_sequence(), 0, whole, "all")]).host().astype(np.float64)
    logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    places = range(len(prefix) + 6, len(whole) - 1)
    surprise = -np.mean([logprobs[place, whole[place + 1]] for place in places])

    assert plain.perplexity == pytest.approx(np.exp(surprise))


def measured(agreement: float, speed: float, num_left: int = 50) -> Measured:
    setting = Setting(policy="margin", layer=4, threshold=0.8)
    return Measured(
        setting,
        num_tokens=100,
        num_agreeing=round(100 * agreement),
        num_left=num_left,
        num_layers_run=600,
        seconds=[1.0, 2.0, 3.0],
        plain_seconds=[speed, 2 * speed, 3 * speed],
    )


def test_the_best_setting_is_the_fastest_of_those_that_agree() -> None:
    fast, right, slow = measured(0.9, 2.0), measured(0.99, 1.2), measured(1.0, 1.1)

    assert best_setting([fast, right, slow], 0.98) is right
    assert best_setting([fast, right, slow], 0.5) is fast
    assert best_setting([fast, right, slow], 1.0) is slow


def test_no_setting_is_best_where_none_gains_time() -> None:
    """Nor is noise a gain, nor what lets nothing leave."""
    assert best_setting([measured(0.9, 2.0), measured(1.0, 1.0), measured(1.0, 1.01)], 0.98) is None
    assert best_setting([measured(1.0, 1.5, num_left=0)], 0.98) is None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "enginehouse.toml"
    file.write_text(
        '[models.m]\nsource = "fake"\nbackend = "fake"\nnum_layers = 8\n'
        '[models.flat]\nsource = "fake"\nbackend = "fake"\n'
        '[models.far]\nsource = "http://127.0.0.1:1/v1"\nbackend = "remote"\n'
    )
    return file


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(main, ["calibrate", "early-exit", *map(str, arguments)])


def test_command_prints_a_table_and_what_follows_from_it(config: Path, tmp_path: Path) -> None:
    """With a text of the user's own, and with ours; a setting that it prints can be read back."""
    text, output = tmp_path / "text.txt", tmp_path / "setting.toml"
    text.write_text(_TEXT)
    done = run(
        "m", "--config", config, "--text", text, "--layers", "3,5", "--target-agreement", "0", "--output", output
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]

    assert done.exit_code == 0, done.output
    assert len(rows) == 2 + 1 + 2 * sum(map(len, THRESHOLDS.values()))
    assert rows[2].startswith("| all layers |  |  | 1.000 | 0.00 | 8.0 |")
    assert output.exists() == ("Fastest at an agreement of 0" in done.stdout)
    assert output.exists() or "No setting gains time" in done.stdout

    ours = run("m", "--config", config, "--policy", "saturation", "--passages", "1")
    assert ours.exit_code == 0, ours.output
    assert "| saturation | 4 | 0.9 |" in ours.stdout


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_shown_at_a_terminal(config: Path, is_terminal: bool) -> None:
    arguments = ("m", "--config", config, "--policy", "margin", "--passages", "1")
    done = run(*arguments, env={"FORCE_COLOR": "1" if is_terminal else "", "TERM": "xterm"})

    assert done.exit_code == 0, done.output
    for text in ("Loading m", "Measuring", "100%"):
        assert (text in done.stderr) == is_terminal, text


def test_the_printed_setting_is_one_that_models_take(tmp_path: Path) -> None:
    file = tmp_path / "enginehouse.toml"
    line = Setting(policy="entropy", layer=22, threshold=0.4).to_toml(30)
    file.write_text(f'[models.m]\nsource = "fake"\n{line}\n')
    policy = load_settings(file, {}).models["m"].exit_policy

    assert policy is not None
    assert (policy.name, policy.options) == ("entropy", {"threshold": 0.4, "min_layer": 22, "every": 30})


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["flat"], 2, "has no access to the layers of this model"),
        (["far"], 2, "forwards requests; it has no layers"),
        (["nowhere.gguf"], 2, "nowhere.gguf"),
        (["m", "--layers", "3,8"], 2, "[8]: this model supports early exit after layers 1 to 7"),
        (["m", "--layers", "x"], 2, "must be whole numbers"),
        (["m", "--target-agreement", "2"], 2, "0<=x<=1"),
        (["m", "--policy", "hope"], 2, "'hope' is not one of"),
    ],
)
def test_what_cannot_be_measured_is_said(config: Path, arguments: list[str], exit_code: int, message: str) -> None:
    done = run(*arguments, "--config", config)

    assert done.exit_code == exit_code
    assert message in done.output


def test_a_text_that_is_too_short_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Hello")
    done = run("m", "--config", config, "--text", tmp_path / "short.txt")

    assert done.exit_code == 1
    assert "the text has 4 tokens; at least 57 are needed" in done.output


def test_help_lists_the_group_and_its_member() -> None:
    """Without importing it."""
    shown = CliRunner().invoke(main, ["calibrate", "--help"])

    assert shown.exit_code == 0
    assert "early-exit" in shown.output
    assert "calibrate" in main.list_commands(click.Context(main))
