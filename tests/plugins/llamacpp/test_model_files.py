"""GGUF files as people have them: in parts, behind links of a hub's cache, beside projectors, with two templates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from enginehouse.cli import main
from enginehouse.contract.backend import ModelSource
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_hf.backend import HfBackend
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.served import served

from .gguf import tiny_tensors, tiny_values, write_gguf, write_parts

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WITH_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + PLAIN
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: whole, in parts, two together, without a part, and files that are none."""
    folder = tmp_path_factory.mktemp("files")
    templates = {"tokenizer__chat_template": PLAIN, "tokenizer__chat_template__tool_use": WITH_TOOLS}
    write_gguf(folder / "two-templates.gguf", tiny_values(**templates), tiny_tensors())
    (folder / "split").mkdir()
    write_parts(folder / "split", "tiny-F32", 3, tokenizer__chat_template=PLAIN)
    for name in ("mmproj-tiny-f16.gguf", "tiny-mmproj-f16.gguf"):
        write_gguf(folder / "split" / name, {"general.architecture": "clip"}, {})
    write_gguf(folder / "split" / "tiny.imatrix.gguf", {"general.type": "imatrix"}, {})
    for name, missing in (("no-second", 2), ("no-first", 1)):
        shutil.copytree(folder / "split", folder / name)
        (folder / name / f"tiny-F32-0000{missing}-of-00003.gguf").unlink()
    (folder / "several").mkdir()
    for name in ("a-F32.gguf", "b-F16.gguf"):
        (folder / "several" / name).hardlink_to(folder / "two-templates.gguf")
    _write_hub_cache(folder / "hub", sorted((folder / "split").glob("tiny-F32-*")))
    return folder


def _write_hub_cache(repository: Path, files: list[Path]) -> None:
    """Links to blobs, as the hub's library keeps downloads."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(files):
        blob = blobs / f"{number:064x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (snapshot / "gone.gguf").symlink_to("../../blobs/gone")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    sources = {
        "two": "two-templates.gguf",
        "folder": "split",
        "first": "split/tiny-F32-00001-of-00003.gguf",
        "link": "hub/snapshots/0123abc/tiny-F32-00001-of-00003.gguf",
        "links": "hub/snapshots/0123abc:F32",
    }
    models = {
        name: ModelSettings(
            source=str(folder / source), backend="llamacpp", context=256, slots=1, load="lazy", options={"threads": 1}
        )
        for name, source in sources.items()
    }
    with served(Settings(models=models, plugins=PluginsSettings(allow=("llamacpp", "parsers")))) as client:
        yield client


def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": model, "messages": ASK, "max_tokens": 2, **fields})


def test_b23_the_second_template_is_rendered_only_with_tools(client: httpx.Client) -> None:
    plain = ask(client, "two").json()["usage"]["prompt_tokens"]
    for fields in ({"tool_choice": "none"}, {"tool_choice": "none", "parallel_tool_calls": False}):
        response = ask(client, "two", tools=[LOOK], **fields)
        assert (response.status_code, response.json()["usage"]["prompt_tokens"]) == (200, plain), response.text
    called = [
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]

    for messages in (ASK, [*ASK, *called], [*ASK, *called, *ASK]):
        for fields in ({}, {"tools": [LOOK], "tool_choice": "none"}):
            response = ask(client, "two", messages=messages, **fields)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("model", ["folder", "first", "link", "links"])
def test_parts_are_one_model(client: httpx.Client, model: str) -> None:
    response = ask(client, model)

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no-second", "1 of its 3 parts are missing (tiny-F32-00002-of-00003.gguf)"),
        ("no-first", "it has parts of a model, but the first one is missing (tiny-F32-00001-of-00003.gguf)"),
        ("split/tiny-F32-00002-of-00003.gguf", "not the first part of its model; give tiny-F32-00001-of-00003.gguf"),
        ("split/mmproj-tiny-f16.gguf", "it holds a projector of images (mmproj), not a model"),
        ("split/tiny.imatrix.gguf", "it holds statistics for quantisation (imatrix), not a model"),
        ("several", "holds several models; name one, as in"),
        ("several", "There are: F32, F16"),
        ("hub/snapshots/0123abc/gone.gguf", "is a link to '../../blobs/gone', which does not exist"),
    ],
)
def test_doctor_says_why_files_are_no_model(folder: Path, source: str, message: str) -> None:
    result = CliRunner().invoke(main, ["doctor", str(folder / source), "--json"], catch_exceptions=False)

    assert result.exit_code == 1
    assert message in result.output, result.output


def test_parts_are_for_llamacpp_only(folder: Path) -> None:
    """transformers would read the first one, and draw the other weights at random."""
    path = folder / "split" / "tiny-F32-00001-of-00003.gguf"
    source = ModelSource(str(path), path)

    assert LlamaCppBackend().match(source).score == 1.0
    assert HfBackend().match(source).score == 0.0
    assert "in several parts" in HfBackend().match(source).reason
    assert LlamaCppBackend().estimate(source, LlamaCppOptions()).weights_bytes > path.stat().st_size
