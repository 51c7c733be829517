"""No text ends the process: what llama.cpp's pre-tokenizers take from the stack is there, or the text is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from enginehouse.contract.errors import GenerationFailed, InvalidRequest
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_llamacpp import pre_tokenizers
from enginehouse_llamacpp import tokenizer as tokenizer_module
from enginehouse_llamacpp.pre_tokenizers import PreTokenizer
from enginehouse_testkit.server_thread import server_thread

from .vocabularies import open_tokenizer, write_with_pre_tokenizer

pytestmark = pytest.mark.llamacpp

RECURSING = """
    afmoe bailingmoe bailingmoe2 bloom chameleon cohere2moe deepseek-coder deepseek-llm deepseek-v3 default exaone-moe
    falcon gpt-4o gpt3-finnish granite-embed-multi-97m hunyuan-dense hy_v4 jais-2 joyai-llm kanana2 llada-moe llama4
    minicpm5 minimax-m2 poro-chat seed-coder spark2_5 superbpe talkie tekken tiny_aya ufakzeka viking youtu
""".split()  # noqa: SIM905
UNITS = (
    "a",
    "A",
    "Aa",
    " ",
    "\n",
    "\r\n",
    " \n",
    "1",
    "!",
    "'",
    "漢",
    "가",
    "\u0301",
    "a\u0301",
    "😀",
    "[",
    "É",
    "\x01",
    "\u00a0",
    "ก",
    "+",
    "!/",
)

_ON_A_SMALL_STACK = """
import sys, threading
from pathlib import Path
from enginehouse.contract.errors import InvalidRequest
from vocabularies import open_tokenizer
method, path, names = sys.argv[1], Path(sys.argv[2]), sys.argv[4:]
units = [bytes.fromhex(unit).decode() for unit in sys.argv[3].split(",")]
def run(encode):
    for text in ("a" + unit * 2000 + end for unit in units for end in ("", "1")):
        try: encode(text, False)
        except InvalidRequest as error: assert "square" in str(error), text[:4]
for name in names:
    print(name, flush=True)
    tokenizer = open_tokenizer(path, name)
    threading.stack_size(2**18)
    thread = threading.Thread(target=run, args=(getattr(tokenizer, method),))
    thread.start()
    thread.join()
"""


every_name_or_some = pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])


def run_on_a_small_stack(
    path: Path, names: Sequence[str], method: str = "encode", units: Sequence[str] = UNITS
) -> subprocess.CompletedProcess[str]:
    """Tokenize 2,000 characters of each kind, in a process, on a stack of 256 KiB; an expression would need 600 KiB."""
    listed = ",".join(unit.encode().hex() for unit in units)
    command = [sys.executable, "-c", _ON_A_SMALL_STACK, method, str(path), listed, *names]
    folder = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300)


@every_name_or_some
def test_those_said_to_need_no_stack_need_none(smollm_path: Path, step: int) -> None:
    """The names in the table, with what this version of llama.cpp does for them."""
    done = run_on_a_small_stack(smollm_path, sorted(pre_tokenizers.WITHOUT_REGEX)[::step])

    assert done.returncode == 0, (done.stdout.split()[-1:], done.stderr[-500:])


@every_name_or_some
def test_others_get_the_stack_that_they_need(smollm_path: Path, step: int) -> None:
    """The same texts; those that would take quadratic time are refused."""
    done = run_on_a_small_stack(smollm_path, RECURSING[::step])

    assert done.returncode == 0, (done.stdout.split()[-1:], done.stderr[-500:])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other standard libraries do not recurse")
def test_without_that_stack_the_process_ends(smollm_path: Path) -> None:
    """So the tests above can fail."""
    done = run_on_a_small_stack(smollm_path, ["gpt-4o"], method="encode_here", units=["a"])

    assert done.returncode not in (0, 1)


@pytest.mark.parametrize("name", ["gpt-4o", "deepseek-v3", "bloom", "exaone-moe"])
@pytest.mark.parametrize("unit", ["A", "!", "漢", " "])
def test_the_longest_text_and_one_more(smollm_path: Path, name: str, unit: str) -> None:
    """What is let in is tokenized, what is refused is told the limit."""
    tokenizer = open_tokenizer(smollm_path, name)
    longest = pre_tokenizers.MAX_MATCH_CHARACTERS - 3
    text = unit * (longest // 2 if unit == " " else longest)  # in lines, white space counts twice

    assert tokenizer.encode(text, False)
    with pytest.raises(InvalidRequest, match=str(pre_tokenizers.MAX_MATCH_CHARACTERS)):
        tokenizer.encode(unit * (longest + 4), False)


@pytest.mark.parametrize(
    ("name", "unit", "end"), [("superbpe", "1", ""), ("deepseek-llm", " ", "1"), ("jais-2", " ", "b")]
)
def test_quadratic_runs_are_refused_and_usual_ones_are_not(smollm_path: Path, name: str, unit: str, end: str) -> None:
    tokenizer = open_tokenizer(smollm_path, name)

    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="square"):
        tokenizer.encode(unit * 100_000 + end, False)
    with pytest.raises(InvalidRequest, match="square"):
        tokenizer.encode((unit * 5000 + " a ") * 100, False)
    assert time.thread_time() - began_s < 1
    assert tokenizer.encode((unit * 40 + " x ") * 5000, False)


def test_special_tokens_beyond_number_are_refused(smollm_path: Path) -> None:
    """Where expressions are compiled behind each of them."""
    text = "<|im_end|>a " * 60_000

    with pytest.raises(InvalidRequest, match="special tokens"):
        open_tokenizer(smollm_path, "gpt-4o").encode(text, True)
    assert open_tokenizer(smollm_path, "gpt-4o").encode(text, False)
    assert len(open_tokenizer(smollm_path).encode(text, True)) == 180_000


def test_the_stack_changes_no_token(smollm_path: Path) -> None:
    """The same text in a thread of its own and, where that is deep enough, in this one."""
    tokenizer = open_tokenizer(smollm_path, "gpt-4o")
    text = "a" * 5000 + " und so weiter " + "é" * 3000

    assert tokenizer.encode(text, False) == tokenizer.encode_here(text, False)
    assert threading.stack_size() == 0


def test_words_of_any_number_need_no_deep_stack(smollm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text of usual words is tokenized where it was asked for; a thread would cost more than a short text."""
    tokenizer = open_tokenizer(smollm_path, "gpt-4o")
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))

    assert tokenizer.encode("some words, and more. " * 20_000, False)


def test_a_stack_that_the_system_refuses_is_an_error(smollm_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit of address space."""
    monkeypatch.setattr(tokenizer_module, "_STACK_BYTES_PER_CHARACTER", 2**36)

    with pytest.raises(GenerationFailed, match="stack of"):
        open_tokenizer(smollm_path, "gpt-4o").encode("a" * 100_000, False)
    assert threading.stack_size() == 0


def test_other_vocabularies_have_no_pre_tokenizer() -> None:
    """SentencePiece and the like; and the model ``gemma4`` implies its own."""
    assert not PreTokenizer.of(False, "llama", "gpt-4o").recurses
    assert not PreTokenizer.of(True, "gemma4", "").recurses
    assert PreTokenizer.of(True, "gpt2", "").recurses
    assert PreTokenizer.of(True, "gpt2", "not known yet").recurses


def test_a_server_tokenizes_a_long_word_and_refuses_a_longer_one(smollm_path: Path, tmp_path: Path) -> None:
    """Through HTTP and the worker, which stays the same."""
    path = write_with_pre_tokenizer(smollm_path, "gpt-4o", tmp_path / "tiny.gguf")
    models = {"tiny": ModelSettings(source=str(path), backend="llamacpp", options={"context": 2048, "threads": 1})}
    settings = Settings(models=models, plugins=PluginsSettings(allow=("llamacpp",)))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=100) as client:
        deadline = time.monotonic() + 60
        while client.get("/v1/models").json()["data"][0]["state"] != "ready":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        answers = [client.post("/tokenize", json={"content": "a" * size}) for size in (40_000, 200_000, 1_000_000)]
        assert [answer.status_code for answer in answers] == [200, 200, 400], answers[0].text
        assert "262144" in answers[2].json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "a" * 1_000_000}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
