"""Servers for the behaviours."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from enginehouse.config import ModelSettings, PluginsSettings, Settings
from enginehouse.testing.script import write_script
from enginehouse.testing.server import ServerProcess, started_server
from enginehouse.testing.server_thread import server_thread

from .client import Server

REAL = {"starter": pytest.mark.llamacpp, "hf": pytest.mark.hf, "mlx": pytest.mark.mlx}
"""SmolLM2 on each backend, and the marker of its tests."""

KINDS = [
    pytest.param(kind, marks=REAL.get(kind, ()))
    for kind in os.environ.get("ENGINEHOUSE_BEHAVIOURS", "scripted fake starter hf mlx").split()
]
MODEL_KINDS = ["fake", *(pytest.param(kind, marks=mark) for kind, mark in REAL.items())]

STARTER_CONFIG = """
[models.starter]
source = "starter"
context = 1024
cache_tokens = 8192
"""
"""A context that tests can fill, and room for many sequences."""

RUNNER_CONFIG = """
[models.{backend}]
source = '{source}'
backend = "{backend}"
context = 1024
{more}
"""
"""The same model as a folder, on a backend that reads folders."""

HF_OPTIONS = 'device = "cpu"\nthreads = 1'
"""One thread: two that wait for each other by spinning stand still beside a busy neighbour."""

QUICK = {
    "test_h01_framing_role_first_finish_last",
    "test_h03_stream_and_whole_say_the_same",
    "test_h08_token_limit",
    "test_h09_several_choices_streamed",
    "test_h10_ban",
    "test_h10_force",
    "test_h12_chat_logprobs",
    "test_h18_json_schema",
    "test_h22_control_strings_stay_text",
    "test_h29_max_tokens_beyond_the_context_ends_there",
    "test_h32_requests_do_not_mix_told_apart_by_bias",
    "test_h32_requests_do_not_mix_told_apart_by_forced_text",
    "test_h32_requests_do_not_mix_told_apart_by_seed",
    "test_h33_leaving_a_stream_frees_the_slot",
    "test_h34_a_salt_shares_nothing_with_others",
    "test_h34_prefix_cache_changes_only_speed",
    "test_h35_each_prompt_gets_its_own_answer",
    "test_h35_ids_of_a_text_say_the_same_as_the_text",
}
"""What the default run shows on hf and mlx; the rest, where the server and not the backend decides, is slow."""

FORCED = "Grüße 漢字かな 한국어 🧑🏽\u200d🚀 🇨🇦 \U0001d518 e\u0301"
"""Text whose characters take one to four bytes, several code points, and a combining accent."""


def _scripts(folder: Path) -> dict[str, ModelSettings]:
    """One scripted model per text that a behaviour needs."""

    def model(name: str, tokens: list, slots: int = 16, **options) -> ModelSettings:
        source = write_script(folder / f"{name}.json", tokens, **options)
        return ModelSettings(source=source, backend="scripted", slots=slots, context=50_000)

    words = [f" word{n}" for n in range(150)]
    single_bytes = [{"bytes": [byte]} for byte in FORCED.encode()]
    pairs = [{"bytes": list(FORCED.encode()[n : n + 3])} for n in range(0, len(FORCED.encode()), 3)]
    return {
        "plain": model("plain", words),
        "short": model("short", ["Hello", " there", "."]),
        "модель": model("cyrillic", ["Привет"]),
        "bytes": model("bytes", single_bytes),
        "thirds": model("thirds", pairs, tokens_per_step=2),
        "breaks": model("breaks", ["a\nb", "\r\n", "c\u2028d", "\x85e", "\u2029", "\x00", '"\\']),
        "colours": model("colours", ['"red', " green", " b", "lue", " violet", " orange", '"']),
        "green": model("green", ["green", " blue", " red"]),
        "mountain": model("mountain", ['"mountaineering', " equipment", '"']),
        "slow": model("slow", [item for n in range(60) for item in (f" {n}", {"delay_s": 0.02})], slots=16),
        "endless": model("endless", [" tick", {"delay_s": 0.005}], slots=1, loop=True),
    }


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose models say known texts."""
    models = _scripts(tmp_path_factory.mktemp("scripts"))
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=()))) as running:
        yield from _ready(running.url, "plain")


@pytest.fixture
def scripted(scripted_server: Server) -> Callable[[str], Server]:
    """Call it with the name of a scripted model."""
    return lambda model: Server(scripted_server.client, model)


@pytest.fixture(scope="session")
def starter_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """``enginehouse serve`` with the real small model in a worker process."""
    config = tmp_path_factory.mktemp("starter") / "enginehouse.toml"
    config.write_text(STARTER_CONFIG, encoding="utf-8")
    with started_server("--config", config) as process:
        yield process


@pytest.fixture(scope="session")
def starter(starter_process: ServerProcess) -> Iterator[Server]:
    """The real small model."""
    yield from _ready(starter_process.url, "starter")


def _folder_server(backend: str, source: Path, folder: Path, more: str = "") -> Iterator[Server]:
    config = folder / "enginehouse.toml"
    config.write_text(RUNNER_CONFIG.format(backend=backend, source=source, more=more), encoding="utf-8")
    with started_server("--config", config, ready_timeout_s=300) as process:
        yield from _ready(process.url, backend)


@pytest.fixture(scope="session")
def hf(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real small model's weights in float32, through transformers."""
    yield from _folder_server("hf", smollm2_folder, tmp_path_factory.mktemp("hf"), HF_OPTIONS)


@pytest.fixture(scope="session")
def mlx(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real small model's weights in float32, through mlx-lm."""
    yield from _folder_server("mlx", smollm2_folder, tmp_path_factory.mktemp("mlx"))


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny deterministic model that says nonsense, behind the real engine."""
    source = str(tmp_path_factory.mktemp("fake"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=2048)
    with server_thread(
        Settings(models={"fake": model}, plugins=PluginsSettings(allow=("llguidance", "parsers")))
    ) as running:
        yield from _ready(running.url, "fake")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On hf and mlx, everything but :data:`QUICK` is slow; the first test waits for a large library and its model."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function)
        if is_here and _kinds(item) & {"hf", "mlx"}:
            item.add_marker(pytest.mark.timeout(400))
            if item.originalname not in QUICK and item.path.stem != "test_same_weights":
                item.add_marker(pytest.mark.slow)


def _kinds(item: pytest.Function) -> set[object]:
    """Which servers a test is given."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return {value for value in given.values() if isinstance(value, str)}


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with a model that says anything."""
    if request.param.startswith("http"):
        yield from _ready(request.param, None)
    else:
        name = "scripted_server" if request.param == "scripted" else request.param
        yield request.getfixturevalue(name)


@pytest.fixture(scope="session", params=MODEL_KINDS)
def model_server(request: pytest.FixtureRequest) -> Server:
    """A server with a model that computes: its text depends on the prompt, and sampling fields have their effect."""
    return request.getfixturevalue(request.param)


def _ready(url: str | None, model: str | None) -> Iterator[Server]:
    server = Server.connect(url or "", model or "", os.environ.get("ENGINEHOUSE_BEHAVIOURS_KEY"))
    with server.client:
        server.wait_ready()
        server.model = model or server.client.get("/v1/models").json()["data"][0]["id"]
        yield server
