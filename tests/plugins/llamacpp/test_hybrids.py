"""Hybrid and recurrent models through a real server: what is computed again, and that the text is the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from enginehouse.contract.backend import ModelSource, Span
from enginehouse_llamacpp.backend import LlamaCppBackend
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_testkit.server import ServerProcess, started_server

from .conftest import OpenRunner
from .hybrid_models import KINDS, write_hybrid

pytestmark = [pytest.mark.llamacpp, pytest.mark.skipif(sys.platform != "linux", reason="finds workers with ps")]

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
OPENING = 1 + len("assistant\n")  # tokens after the last message: "<s>", and one for each character
SYSTEM = {"role": "system", "content": "Answer in the language of the question, and say no more than was asked for."}
QUESTION = {"role": "user", "content": "Which rivers flow through the town, and where do they end?"}
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def write_config(folder: Path, kinds: Iterable[str], **settings: str) -> Path:
    settings = {"backend": "llamacpp", **settings}
    lines = ["context = 2048", "slots = 4", "threads = 1", *(f'{key} = "{text}"' for key, text in settings.items())]
    models = {kind: write_hybrid(folder, kind, tokenizer__chat_template=TEMPLATE) for kind in kinds}
    parts = ["\n".join([f"[models.{kind}]", f'source = "{path}"', *lines]) for kind, path in models.items()]
    path = folder / "enginehouse.toml"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """One model of each kind."""
    with started_server("--config", write_config(folder, KINDS)) as running:
        yield running


class Client:
    """Chats with one model; every answer is compared with one that shares nothing with other requests."""

    def __init__(self, http: httpx.Client, kind: str) -> None:
        self._http = http
        bias = {str(token_id): 60 for token_id in (260, 261)}  # "a" and "b": texts that are their tokens again
        self.options: dict[str, Any] = {"model": kind, "temperature": 0, "logit_bias": bias}

    def post(self, *messages: dict[str, str], **fields: Any) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, **self.options, **fields}
        answer = self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def ask(self, *messages: dict[str, str], **fields: Any) -> tuple[str, int, int]:
        """Return the text, the number of tokens of the prompt, and how many of them were cached."""
        whole, alone = self.post(*messages, **fields), self.post(*messages, cache_prompt=False)
        texts = {choice["message"]["content"] for choice in whole["choices"]}
        assert texts == {alone["choices"][0]["message"]["content"]}
        usage = whole["usage"]
        return texts.pop(), usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def stream(self, *messages: dict[str, str], **fields: Any) -> Iterator[str]:
        body = {"messages": messages, **self.options, **fields, "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        yield choice["delta"].get("content") or ""


@contextlib.contextmanager
def connected(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(server.url), timeout=120) as http:
        yield http


@pytest.fixture(params=KINDS)
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    with connected(server) as http:
        yield Client(http, request.param)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_computes_only_what_is_new(client: Client) -> None:
    """Its turns, a question again, an edited one, a turn without an answer's thoughts, and another conversation."""
    text, num_first, num_cached = client.ask(SYSTEM, QUESTION)
    assert num_cached == 0
    held = num_first
    messages = [SYSTEM, QUESTION, said(text)]
    for question in ("Which of them is the longest one?", "And which one freezes in a usual winter?"):
        messages.append(user(question))
        text, num_prompt, num_cached = client.ask(*messages)
        assert num_cached == held + ANSWER_TOKENS - 1, "all but the last token of the answer, which was not computed"
        held, before = num_prompt, held
        messages.append(said(text))

    assert client.ask(*messages[:-1])[2] == held - OPENING, "the same question again"
    edited = [*messages[:-2], user("And which one is the coldest?")]
    assert client.ask(*edited)[2] >= before + ANSWER_TOKENS - 1
    assert client.ask(SYSTEM, QUESTION, said("b"), user("Why?"))[2] == num_first - OPENING
    other = client.ask(SYSTEM, user("Something else: how high is the tower?"))[2]
    assert other == num_first - OPENING - 2 - len("user\n") - len(QUESTION["content"]), "up to the first question"


def test_the_model_says_that_it_goes_back_to_checkpoints(server: ServerProcess, client: Client) -> None:
    with connected(server) as http:
        shown = http.get(f"/v1/models/{client.options['model']}").json()

    assert shown["metadata"]["truncation"] == "checkpoint"


def test_choices_and_concurrent_conversations_share_their_beginning(client: Client) -> None:
    system = {"role": "system", "content": "Say nothing that is not in this document: " + "ab" * 40}
    client.ask(system, QUESTION, n=2)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(client.ask, system, user(f"{number}. What does it say?")) for number in range(4)]
    assert min(one.result()[2] for one in asked) > len(system["content"])


def test_a_killed_worker_changes_no_text(server: ServerProcess) -> None:
    """The next worker computes the prompt and what was said once more, and goes on."""
    with connected(server) as http:
        client = Client(http, "qwen35")
        expected = client.post(SYSTEM, QUESTION, max_tokens=1500)["choices"][0]["message"]["content"]
        pieces = client.stream(SYSTEM, QUESTION, max_tokens=1500)
        begun = next(piece for piece in pieces if piece)
        killed = set(_workers(server))
        for worker in killed:
            os.kill(worker, signal.SIGKILL)

        assert begun + "".join(pieces) == expected
        assert client.ask(SYSTEM, QUESTION)[1] > 0
        assert not killed & set(_workers(server))


@pytest.mark.slow
def test_saved_sequences_go_back_to_their_checkpoints_after_a_restart(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["qwen35"], prefix_cache_dir=str(tmp_path / "states"))
    with started_server("--config", config) as running, connected(running) as http:
        num_first = Client(http, "qwen35").ask(SYSTEM, QUESTION)[1]
    with started_server("--config", config) as running, connected(running) as http:
        num_cached = Client(http, "qwen35").ask(SYSTEM, QUESTION, said("b"), user("Why?"))[2]

    assert num_cached == num_first - OPENING


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_has_the_states(folder: Path, open_runner: OpenRunner, kind: str) -> None:
    """Those of all sequences, and the copies; llama.cpp's copy has a few bytes more."""
    path, backend = write_hybrid(folder, kind), LlamaCppBackend()

    def total_bytes(**options: int) -> int:
        return backend.estimate(ModelSource(str(path), path), LlamaCppOptions(slots=2, **options)).total_bytes

    state_bytes = total_bytes(checkpoints=2) - total_bytes(checkpoints=1)
    runner = open_runner(path, slots=2, context=64, threads=1)
    sizes = []
    for places in ((), (1,), (1, 4)):
        sequence = runner.open_sequence()
        for start in range(5):
            runner.forward([Span(sequence, start, np.array([5 + start], np.int32))])
            if start in places:
                runner.keep_checkpoint(sequence)
        sizes.append(len(runner.save(sequence)))
        runner.free_sequence(sequence)

    assert state_bytes <= sizes[1] - sizes[0] < state_bytes + 200
    assert sizes[1] == sizes[2], "that at the end is the state of the sequence"
    assert runner.capabilities.max_sequences == 4
    runner.close()


def _workers(server: ServerProcess) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "enginehouse.workers" in line]
