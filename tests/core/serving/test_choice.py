"""Which file a source means, which backend opens it, and what users are told about that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from click.testing import CliRunner

from enginehouse.cli import main
from enginehouse.cli.serve import choose_models
from enginehouse.contract.backend import Match, ModelSource, Probe
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.gguf_names import quantization_of
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.sources import choose_backend, find_source, judge_all
from enginehouse.settings.config import PluginsSettings, load_settings
from enginehouse_testkit.fake_runner import FakeBackend

NO_PLUGINS = PluginRegistry(request_fields={}, plugins=())


@frozen
class _Backend(FakeBackend):
    """Says what it is told to say."""

    name: str
    score: float
    devices: tuple[str, ...] = ("cpu",)

    def probe(self) -> Probe:
        return Probe(True, self.devices)

    def match(self, source: ModelSource) -> Match:
        return Match(self.score, "suits")


def _choose(*backends: _Backend) -> tuple[str, str]:
    choice = choose_backend(ModelSource("m"), None, {backend.name: backend for backend in backends})  # type: ignore[misc]
    return choice.backend.name, choice.reason


def gguf(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def safetensors(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(b"\0" * 16)
    return folder


# -- ties ------------------------------------------------------------------------------------------


def test_of_equals_the_one_with_an_accelerator_is_chosen_and_says_so() -> None:
    assert _choose(_Backend("a", 0.5), _Backend("b", 0.5, ("cuda:0", "cpu"))) == (
        "b",
        "suits; before a as it has cuda:0",
    )
    assert _choose(_Backend("b", 0.5), _Backend("a", 0.5)) == ("a", "suits; before b by name")


def test_better_match_wins_over_an_accelerator() -> None:
    assert _choose(_Backend("a", 0.6), _Backend("b", 0.5, ("cuda:0",))) == ("a", "suits")


# -- the first-party backends ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def backends() -> Any:
    return PluginRegistry.load(PluginsSettings(allow=("hf", "llamacpp", "mlx", "remote"))).backends


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_first_party_backends_share_the_sources_out(
    backends: Any, platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    file = gguf(tmp_path / "g", "model-Q4_K_M.gguf") / "model-Q4_K_M.gguf"
    plain = safetensors(tmp_path / "plain")
    packed = safetensors(tmp_path / "packed", quantization={"bits": 4, "group_size": 64})

    def chosen(text: str) -> str:
        return choose_backend(find_source(text, NO_PLUGINS), None, backends, probe=False).backend.name

    assert chosen(str(file)) == "llamacpp"
    assert chosen(str(packed)) == "mlx"
    assert chosen(str(plain)) == ("mlx" if platform == "darwin" else "hf")
    assert chosen("http://localhost:8000/v1") == "remote"


def test_every_backend_is_judged_the_best_first(backends: Any, tmp_path: Path) -> None:
    verdicts = judge_all(find_source(str(safetensors(tmp_path)), NO_PLUGINS), backends, probe=False)

    assert [verdict.score for verdict in verdicts] == sorted((v.score for v in verdicts), reverse=True)
    assert {verdict.backend.name for verdict in verdicts} == {"hf", "llamacpp", "mlx", "remote"}
    assert all(verdict.reason for verdict in verdicts)


def test_choosing_imports_no_library_of_a_backend(tmp_path: Path) -> None:
    safetensors(tmp_path / "plain")
    code = """
import sys
from enginehouse.settings.config import PluginsSettings
from enginehouse.serving.sources import judge_all
from enginehouse.serving.sources import find_source
from enginehouse.plugins import PluginRegistry
registry = PluginRegistry.load(PluginsSettings(allow=("hf", "llamacpp", "mlx", "remote")))
assert len(judge_all(find_source(sys.argv[1], registry), registry.backends)) == 4
print([name for name in ("torch", "transformers", "mlx", "mlx_lm", "llama_cpp", "httpx") if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plain")], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "[]"


# -- quantisations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("model-Q4_K_M.gguf", "Q4_K_M"),
        ("model.iq2_xxs.gguf", "IQ2_XXS"),
        ("model-f16.gguf", "F16"),
        ("model-BF16-00001-of-00003.gguf", "BF16"),
        ("gemma-3-270m-it-qat-q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model.gguf", None),
        ("unbf16.gguf", None),
    ],
)
def test_quantisation_is_read_from_the_name(name: str, quantization: str | None) -> None:
    assert quantization_of(Path(name)) == quantization


def test_colon_picks_the_quantisation_in_a_folder(tmp_path: Path) -> None:
    folder = gguf(
        tmp_path / "repo",
        "m-Q4_K_M.gguf",
        "m-Q8_0.gguf",
        "mmproj-m-Q8_0.gguf",
        "big/m-F16-00001-of-00002.gguf",
        "big/m-F16-00002-of-00002.gguf",
    )

    assert find_source(f"{folder}:Q4_K_M", NO_PLUGINS).path == folder / "m-Q4_K_M.gguf"
    assert find_source(f"{folder}:q8_0", NO_PLUGINS).path == folder / "m-Q8_0.gguf"
    assert find_source(f"{folder}:F16", NO_PLUGINS).path == folder / "big/m-F16-00001-of-00002.gguf"
    with pytest.raises(ModelLoadError, match=r"no GGUF file there is Q5_K_M; there are: F16, Q4_K_M, Q8_0"):
        find_source(f"{folder}:Q5_K_M", NO_PLUGINS)
    with pytest.raises(ModelLoadError, match=r"holds several models; name one"):
        find_source(str(folder), NO_PLUGINS)


def test_files_without_a_quantisation_are_listed_by_their_paths(tmp_path: Path) -> None:
    folder = gguf(tmp_path / "many", "a/model.gguf", "b/model.gguf")

    with pytest.raises(ModelLoadError, match=r"give the path of one\. There are: a/model\.gguf, b/model\.gguf"):
        find_source(str(folder), NO_PLUGINS)


def test_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    folder = gguf(tmp_path / "one", "m-Q4_0.gguf", "mmproj-f16.gguf")

    assert find_source(str(folder), NO_PLUGINS).path == folder / "m-Q4_0.gguf"
    assert find_source(str(safetensors(tmp_path / "st")), NO_PLUGINS).path == tmp_path / "st"
    with pytest.raises(ModelLoadError, match="no GGUF files of which to pick 'Q4_0'"):
        find_source(f"{tmp_path / 'st'}:Q4_0", NO_PLUGINS)


def test_folders_are_searched_as_deep_as_those_of_models(tmp_path: Path) -> None:
    """A home folder is not one; a search of all that is in it would take minutes."""
    gguf(tmp_path, "a/b/c/d.gguf")
    assert find_source(str(tmp_path), NO_PLUGINS).path == tmp_path
    gguf(tmp_path, "a/b/m.gguf")
    assert find_source(str(tmp_path), NO_PLUGINS).path == tmp_path / "a/b/m.gguf"
    (tmp_path / "a" / "many").mkdir()
    for number in range(10_001):
        (tmp_path / "a" / "many" / str(number)).touch()
    with pytest.raises(ModelLoadError, match="a folder of more than 10000 files; give that of one model"):
        find_source(str(tmp_path), NO_PLUGINS)


def test_ambiguous_quantisation_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    folder = gguf(tmp_path, "a-Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(ModelLoadError, match=r"a-Q4_0.gguf, b-Q4_0.gguf"):
        find_source(f"{folder}:Q4_0", NO_PLUGINS)


def test_quantisation_behind_a_relative_folder_of_a_configuration(tmp_path: Path) -> None:
    gguf(tmp_path / "models", "m-Q4_0.gguf")
    config = tmp_path / "enginehouse.toml"
    config.write_text('[models.m]\nsource = "models:Q4_0"\n[models.u]\nsource = "http://localhost:8000"\n')
    settings = load_settings(config, {})

    assert find_source(settings.models["m"].source, NO_PLUGINS).path == tmp_path / "models" / "m-Q4_0.gguf"
    assert settings.models["u"].source == "http://localhost:8000"


# -- what users see --------------------------------------------------------------------------------


def test_served_names_are_short_where_sources_are_long(tmp_path: Path) -> None:
    folder = gguf(tmp_path / "repo", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    registry = PluginRegistry.load(PluginsSettings(allow=("remote",)), builtin=["fake"])

    def names(argument: str, backend: str) -> list[str]:
        return list(choose_models([argument], backend, {}, registry))

    assert names("http://localhost:8000/v1", "remote") == ["localhost:8000"]
    assert names(f"{folder}:Q8_0", "fake") == ["m-Q8_0"]


def test_doctor_shows_backends_and_why_one_opens_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = gguf(tmp_path / "repo", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    shown = CliRunner().invoke(main, ["doctor", f"{folder}:Q8_0", "--backend", "fake", "--json"])
    report = json.loads(shown.stdout)
    model = report["models"][0]

    assert (model["backend"], model["reason"]) == ("fake", "named in the settings")
    assert model["path"] == str(folder / "m-Q8_0.gguf")
    scores = {verdict["backend"]: verdict["reason"] for verdict in model["verdicts"]}
    assert set(scores) >= {"hf", "llamacpp", "mlx", "remote", "fake"}
    assert {backend["name"] for backend in report["backends"]} == set(scores)
    assert report["versions"]["enginehouse"]


def test_doctor_finds_what_cannot_be_opened_and_says_so_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "enginehouse.toml").write_text('[models.gone]\nsource = "gone.gguf"\n')
    shown = CliRunner().invoke(main, ["doctor"])

    assert shown.exit_code == 1
    assert "file or folder not found" in shown.output
    assert "llamacpp" in shown.output


def test_models_show_the_reason_of_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "enginehouse.toml").write_text('[models.there]\nsource = "http://localhost:9/v1"\n')
    rows = json.loads(CliRunner().invoke(main, ["models", "--json"]).stdout)

    there = next(row for row in rows if row["name"] == "there")
    assert there["reason"] or there["error"]
    assert (there["backend"], there["reason"]) in {("remote", "an address of a server"), (None, "")}
