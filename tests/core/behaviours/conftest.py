"""Servers for the behaviours."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.server_thread import server_thread

from .client import Server

REAL = {"starter": pytest.mark.llamacpp, "hf": pytest.mark.hf, "mlx": pytest.mark.mlx}
"""SmolLM2 on each backend, and the marker of its tests."""

TINY = {"tiny_hf": pytest.mark.hf, "tiny_mlx": pytest.mark.mlx}
"""Llama with two small layers of random weights: every behaviour on each backend, in little time."""

ON_BACKENDS = {**REAL, **TINY}

KINDS = [
    pytest.param(kind, marks=ON_BACKENDS.get(kind, ()))
    for kind in os.environ.get("ENGINEHOUSE_BEHAVIOURS", " ".join(["scripted", "fake", *ON_BACKENDS])).split()
]
MODEL_KINDS = ["fake", *(pytest.param(kind, marks=mark) for kind, mark in ON_BACKENDS.items())]

GEMMA = {"gemma_llamacpp": 2.5, "gemma_hf": 0.05}
"""Gemma 3 270M (windows, 262k tokens, no chat template) on two backends, and how much its log-probabilities may differ.

As in the backends' contracts: llama.cpp's Q5_0 and Q8_0 kernels round by batch, which grows from layer to layer.
"""

STARTER_CONFIG = """
[models.starter]
source = "starter"
context = 1024
cache_tokens = 8192
threads = 1
"""
"""A context that tests can fill, room for many sequences, and one thread, as another server may compute beside it."""

RUNNER_CONFIG = """
[models.{backend}]
source = '{source}'
backend = "{backend}"
context = {context}
{more}
"""
"""A model that is a folder, on a backend that reads folders."""

HF_OPTIONS = 'device = "cpu"\nthreads = 1'
"""One thread: two that wait for each other by spinning stand still beside a busy neighbour."""

QUICK = {
    "test_h01_framing_role_first_finish_last",
    "test_h34_prefix_cache_changes_only_speed",
    "test_h35_ids_of_a_text_say_the_same_as_the_text",
}
"""What the default run shows with SmolLM2 on hf and mlx, which take a second or more per token of a busy CPU."""

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


def _folder_server(backend: str, source: Path, folder: Path, more: str = "", context: int = 1024) -> Iterator[Server]:
    config = folder / "enginehouse.toml"
    text = RUNNER_CONFIG.format(backend=backend, source=source, more=more, context=context)
    config.write_text(text, encoding="utf-8")
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
def tiny_folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a longer context and ChatML's control tokens; it says ASCII, and ends only when told to."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("tiny") / "llama")
    for path in (*folder.glob("*token*.json"), *folder.glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        text = text.replace("<start_of_turn>", "<|im_start|>").replace("<end_of_turn>", "<|im_end|>")
        path.write_text(text, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _silence(folder)
    return folder


def _silence(folder: Path) -> None:
    """Give control tokens and bytes of longer characters a logit of 0, far below the best ones."""
    from safetensors.numpy import load_file, save_file

    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in spec["added_tokens"]}
    weights = load_file(folder / "model.safetensors")
    for token, token_id in spec["model"]["vocab"].items():
        if token_id in special or not token.replace("Ġ", " ").replace("Ċ", " ").isascii():
            weights["lm_head.weight"][token_id] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="session")
def tiny_hf(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny Llama through transformers."""
    yield from _folder_server("hf", tiny_folder, tmp_path_factory.mktemp("hf"), HF_OPTIONS, context=2048)


@pytest.fixture(scope="session")
def tiny_mlx(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny Llama through mlx-lm; it draws the tokens, as it does on a GPU."""
    yield from _folder_server("mlx", tiny_folder, tmp_path_factory.mktemp("mlx"), 'draws = "mlx"', context=2048)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny deterministic model that says nonsense, behind the real engine."""
    source = str(tmp_path_factory.mktemp("fake"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=2048)
    with server_thread(
        Settings(models={"fake": model}, plugins=PluginsSettings(allow=("llguidance", "parsers")))
    ) as running:
        yield from _ready(running.url, "fake")


def _gemma(backend: str, source: Path, folder: Path, more: str = "") -> Iterator[Server]:
    for server in _folder_server(backend, source, folder, more):
        server.rounding = GEMMA[f"gemma_{backend}"]
        yield server


@pytest.fixture(scope="session")
def gemma_llamacpp(gemma_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Gemma 3 on llama.cpp."""
    yield from _gemma("llamacpp", gemma_gguf, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def gemma_hf(gemma_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same file through transformers."""
    yield from _gemma("hf", gemma_gguf, tmp_path_factory.mktemp("gemma"), HF_OPTIONS)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SmolLM2 on hf and mlx is slow but for :data:`QUICK`; the first test waits for a large library and its model."""
    for item in items:
        is_here = item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function)
        if is_here and _kinds(item) & {"hf", "mlx"}:
            item.add_marker(pytest.mark.timeout(900))
            if item.originalname not in QUICK and item.path.stem != "test_same_weights":
                item.add_marker(pytest.mark.slow)


def gemma_kinds(*, need_equal_text: bool = False) -> list[Any]:
    """Parameters of ``server`` and ``model_server`` for Gemma; on llama.cpp its text depends on the batch."""
    return [
        pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.timeout(900), getattr(pytest.mark, kind[6:])])
        for kind, rounding in GEMMA.items()
        if rounding < 1 or not need_equal_text
    ]


def and_gemma(fixture: Literal["server", "model_server"], *, need_equal_text: bool = False) -> pytest.MarkDecorator:
    """A test of the usual servers and of those with Gemma."""
    kinds = KINDS if fixture == "server" else MODEL_KINDS
    return pytest.mark.parametrize(fixture, [*kinds, *gemma_kinds(need_equal_text=need_equal_text)], indirect=True)


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
