"""docs/api.md tells what becomes of every parameter of every API that Enginehouse speaks."""

from __future__ import annotations

import pytest

from .parameters import SEEDS, parameter_table
from .repository import ROOT

TABLE = parameter_table()
WORDS = {"native", "emulated", "accepted", "refused"}


def cells(name: str) -> list[str]:
    """The row of a parameter."""
    rows = [line for line in TABLE.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"{name} has {len(rows)} rows"
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_parameter_of_the_seed_has_a_row(seed: str) -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")

    for name in SEEDS[seed].split():
        _, of, *_, reason = cells(name)
        assert seed in of.split(", ")
        assert reason
        assert f"\n| `{name}` | " in page


def test_each_backend_says_one_of_four_words() -> None:
    header = TABLE.splitlines()[0]
    for backend in ("hf", "llamacpp", "mlx", "remote"):
        assert f"`{backend}`" in header
    for line in TABLE.splitlines()[2:]:
        for cell in line.strip("|").split("|")[3:7]:
            assert set(cell.strip().split(", else ")) <= WORDS


def test_what_depends_on_the_model_says_both() -> None:
    assert cells("suffix")[3] == "native, else refused"
    assert cells("tools")[3] == "native, else emulated"
    assert cells("thinking_budget")[3] == "emulated, else accepted"


def test_what_depends_on_the_backend_says_so_for_each() -> None:
    """On a GPU, hf and mlx draw on the device; typical_p they leave to core."""
    assert cells("temperature")[3:7] == ["native, else emulated", "emulated", "native, else emulated", "native"]
    assert cells("typical_p")[3:7] == ["emulated"] * 3 + ["native, else refused"]


def test_a_remote_takes_what_the_server_behind_it_takes() -> None:
    """Another Enginehouse, else a server of which only OpenAI's API is known."""
    assert cells("top_k")[6] == "native, else refused"
    assert cells("top_logprobs")[6] == cells("logprobs")[6] == "native"
    assert cells("mirostat_mode")[6] == "refused"
    assert cells("user")[6] == "accepted"
