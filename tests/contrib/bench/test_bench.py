"""``enginehouse bench``: workloads, results, and runs against scripted servers whose delays are known."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from enginehouse.cli import main
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse_bench.driving import Answered, Run, Served, drive
from enginehouse_bench.results import Goals, Results, results_of
from enginehouse_bench.workload import Lengths, Workload, parse_lengths
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import server_thread

TTFT_S, GAP_S, NUM_TOKENS = 0.2, 0.05, 8


# -- workloads -------------------------------------------------------------------------------------


def workload(num_requests: int = 20, **changes: Any) -> Workload:
    return Workload(
        **{"num_requests": num_requests, "prompt_words": Lengths(5, 50), "output_tokens": Lengths(1, 9), **changes}
    )


def test_same_seed_gives_the_same_work_and_no_two_prompts_are_alike() -> None:
    first, second = list(workload().requests()), list(workload().requests())

    assert first == second
    assert first != list(workload(seed=1).requests())
    assert len({planned.prompt for planned in first}) == 20
    assert all(6 <= len(planned.prompt.split()) <= 51 for planned in first)
    assert {planned.max_tokens for planned in first} <= set(range(1, 10))


def test_shared_words_stand_in_front_of_every_prompt() -> None:
    beginnings = {" ".join(planned.prompt.split()[:30]) for planned in workload(shared_words=30).requests()}

    assert len(beginnings) == 1


def test_requests_in_time_come_at_the_rate_on_average() -> None:
    due = [planned.due_s for planned in workload(4000, rate=10.0).requests()]

    assert due == sorted(due)
    assert due[-1] == pytest.approx(400, rel=0.1)
    gaps = [after - before for before, after in pairwise(due)]
    assert max(gaps) > 3 * sum(gaps) / len(gaps)  # random, not even


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("64-512", 64, 512), ("normal:100:10", 60, 140), ("1", 1, 1)]
)
def test_lengths_stay_within_their_bounds(text: str, low: int, high: int) -> None:
    source = random.Random(1)
    drawn = [parse_lengths(text).draw(source) for _ in range(500)]

    assert str(parse_lengths(text)) == text
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert len(set(drawn)) > 1 or low == high


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "1-2-3", "normal:5", "normal:0:1", "-5", "99999999"])
def test_other_texts_are_no_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        parse_lengths(text)


# -- results ---------------------------------------------------------------------------------------


def answered(due_s: float, *times_s: float, tokens: int | None = None, error: str | None = None) -> Answered:
    return Answered(
        due_s=due_s,
        text_times_s=list(times_s),
        end_s=times_s[-1] if times_s else due_s,
        num_prompt_tokens=10,
        num_output_tokens=len(times_s) if tokens is None else tokens,
        error=error,
    )


def test_figures_are_those_of_the_times() -> None:
    run = Run((answered(0.0, 1.0, 1.5, 2.0), answered(1.0, 1.5, 1.75, tokens=6), answered(0.0, error="500 boom")), 4.0)
    results = results_of(run, 5, Goals(ttft_ms=600))

    assert (results.num_requests, results.num_answered, results.num_cut) == (5, 2, 2)
    assert results.errors == {"500 boom": 1}
    assert (results.num_prompt_tokens, results.num_output_tokens) == (20, 9)
    assert results.output_tokens_per_s == pytest.approx(9 / 4)
    assert results.total_tokens_per_s == pytest.approx(29 / 4)
    assert results.ttft_ms.p50 == pytest.approx(750)
    assert results.ttft_ms.max == pytest.approx(1000)
    assert results.itl_ms.mean == pytest.approx((500 + 500 + 250) / 3)
    assert results.tpot_ms.mean == pytest.approx((500 + 50) / 2)
    assert results.latency_ms.max == pytest.approx(2000)
    assert results.goodput == pytest.approx(1 / 3)


def test_percentiles_lie_between_neighbours() -> None:
    run = Run(tuple(answered(0.0, value / 10) for value in range(1, 12)), 2.0)

    assert results_of(run, 11).ttft_ms.p50 == pytest.approx(600)
    assert results_of(run, 11).ttft_ms.p95 == pytest.approx(1050)


def test_a_run_without_answers_has_no_times_and_no_goodput() -> None:
    results = results_of(Run((), 1.0, is_cut=True), 3)

    assert results.ttft_ms.p50 is None
    assert results.goodput is None
    assert results.num_cut == 3


# -- runs ------------------------------------------------------------------------------------------

Start = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose models answer at known times."""
    folder = tmp_path_factory.mktemp("scripts")
    piece = [{"text": "word "}, {"delay_s": GAP_S}]
    scripts = {
        "slow": [{"delay_s": TTFT_S}, *piece * NUM_TOKENS],
        "failing": [{"text": "half"}, {"error": "boom"}],
        "endless": [{"text": "on "}, {"delay_s": 0.5}] * 1000,
    }
    models = {}
    for name, tokens in scripts.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({"tokens": tokens}))
        models[name] = ModelSettings(source=str(file), backend="scripted", slots=64)
    models["embedder"] = ModelSettings(source="fake-pooler", backend="fake-pooler")
    with server_thread(Settings(models=models)) as running:
        wait_ready(running.url)
        yield running.url


def measure(url: str, model: str = "slow", clients: int = 4, limit_s: float = 60.0, **changes: Any) -> Results:
    work = workload(**{"num_requests": 8, "output_tokens": Lengths(64, 64), **changes})
    run = drive(Served(f"{url}/v1", model), work, clients=clients, limit_s=limit_s, timeout_s=30)
    return results_of(run, work.num_requests)


def test_figures_are_those_of_the_script(url: str) -> None:
    results = measure(url)

    assert results.num_answered == 8
    assert results.num_output_tokens == 8 * NUM_TOKENS
    assert results.ttft_ms.p50 is not None
    assert TTFT_S * 1000 <= results.ttft_ms.p50 < TTFT_S * 1000 + 2000
    assert results.itl_ms.p50 == pytest.approx(GAP_S * 1000, rel=0.6)
    assert results.wall_s >= 2 * (TTFT_S + GAP_S * NUM_TOKENS)  # two requests of each client, one after the other
    assert results.output_tokens_per_s == pytest.approx(8 * NUM_TOKENS / results.wall_s)


def test_waiting_for_a_free_client_counts_as_the_servers_time(url: str) -> None:
    """Requests that are due at the same time, and one client: the last one has waited for all others."""
    results = measure(url, clients=1, num_requests=4, rate=1000.0)
    one_s = TTFT_S + GAP_S * NUM_TOKENS

    assert results.ttft_ms.max is not None
    assert results.ttft_ms.max >= 3 * one_s * 1000


def test_run_ends_when_its_time_is_up(url: str) -> None:
    results = measure(url, "endless", clients=2, limit_s=1.5)

    assert results.num_answered == 0
    assert results.num_cut == 8
    assert results.wall_s < 20


def test_errors_are_counted_by_their_reason(url: str) -> None:
    results = measure(url, "failing")

    assert results.num_answered == 0
    assert sum(results.errors.values()) == 8
    assert all("The model failed" in reason for reason in results.errors)


def test_server_that_is_not_there_fails_each_request() -> None:
    results = measure("http://127.0.0.1:9", num_requests=2)

    assert results.errors == {"connection: ConnectionRefusedError": 2}


# -- the command -----------------------------------------------------------------------------------


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def test_command_prints_tables_and_writes_files(url: str, tmp_path: Path) -> None:
    files = tmp_path / "results.json", tmp_path / "results.md"
    result = bench(
        "--url", url, "--requests", "3", "--clients", "3", "--goal-ttft", "60000",
        "--json", str(files[0]), "--markdown", str(files[1]),
    )  # fmt: skip
    data = json.loads(files[0].read_text())

    assert result.exit_code == 0
    assert "3 of 3" in result.output
    assert "time to first token" in result.output
    assert data["setting"]["model"] == "slow"
    assert data["setting"]["prompt_words"] == "128"
    assert data["figures"]["num_answered"] == 3
    assert data["figures"]["goodput"] == 1.0
    assert "| output tokens | 24 |" in files[1].read_text()
    assert "| time to first token |" in files[1].read_text()


def test_embeddings_are_measured_at_each_load(url: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    loads = ("--load", "1x1", "--load", "2x5", "--words", "4-8", "--seconds", "0.2")
    result = bench("embeddings", url, *loads, "--json", str(file))
    data = json.loads(file.read_text())

    assert result.exit_code == 0
    assert data["setting"]["model"] == "embedder", "the first one listed that makes embeddings"
    assert [one["load"] for one in data["figures"]] == ["1x1", "2x5"]
    assert data["setting"]["encoding_format"] == "base64"
    for one, texts in zip(data["figures"], (1, 5), strict=True):
        assert one["num_texts"] == texts * one["num_requests"] > 0
        assert one["num_tokens"] > 4 * one["num_texts"]
        assert one["wall_s"] >= 0.2 and 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["max"]
        assert re.search(rf"{one['load']} .* 0 *$", result.output, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embeddings", "--model", "slow"], "does not serve such requests: 400"),
        (["embeddings", "--load", "0x1"], "is not a load; write CLIENTSxTEXTS"),
        (["embeddings", "http://192.0.2.1:8080"], "needs --allow-remote"),
        (["--url", "http://192.0.2.1:8080"], "is not on this machine; loading it needs --allow-remote"),
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--prompt", "many"], "is not a length"),
        (["--clients", "5000"], "1<=x<=1024"),
        (["--field", "temperature"], "must be JSON"),
        (["--field", "temperature=99"], "does not serve such requests: 400"),
        (["--model", "failing"], "does not serve such requests: error in the stream: "),
    ],
)
def test_what_cannot_be_measured_is_refused(url: str, arguments: list[str], message: str) -> None:
    if arguments[0] == "embeddings":
        asked = arguments if arguments[1].startswith("http") else ["embeddings", url, *arguments[1:]]
    else:
        asked = arguments if "--url" in arguments else ["--url", url, *arguments]
    result = bench(*asked)

    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())


def test_help_names_the_command_without_importing_it() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "enginehouse", "--help"], capture_output=True, text=True, check=True
    )

    assert re.search(r"\n  bench +Measure a running server under load\.\n", shown.stdout)
    assert "enginehouse_bench.command" not in shown.stderr
