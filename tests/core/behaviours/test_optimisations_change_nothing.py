"""Greedy text is the same with and without prefix cache, drafters and batches, and with all of them together.

On SmolLM2: on llama.cpp, whose kernels compute a token of it the same way in every batch, and with torch and MLX on the
CPU in float32, whose rounding differs a little by batch.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from enginehouse_testkit.server import started_server

from .client import Server
from .workloads import PROMPTS, WAYS, Prompt, one_model_in_all_ways

BACKENDS = {
    "llamacpp": "cache_tokens = 16384\n",
    "hf": 'cache_tokens = 16384\nbackend = "hf"\ndevice = "cpu"\ndtype = "float32"\n',
    "mlx": 'backend = "mlx"\ndtype = "float32"\n',
}
"""Further settings of the model on each backend."""

_BY_NAME = {prompt.name: prompt for prompt in PROMPTS}
FEW = [
    *(_BY_NAME[name] for name in ("edit 0", "chat 1", "json 2")),
    Prompt("conversation of two turns", _BY_NAME["conversation 4"].messages[:3]),
]
"""The first one has a prediction. Core drafts for it, as it has measured no steps of the model yet."""

Answers = dict[str, tuple[str, dict[str, Any]]]
"""Name of a prompt to the text of its answer and what was saved for it."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("llamacpp", marks=pytest.mark.llamacpp),
        pytest.param("hf", marks=[pytest.mark.hf, pytest.mark.slow]),
        pytest.param("mlx", marks=[pytest.mark.mlx, pytest.mark.slow]),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("optimised")
    model, config = folder / "smollm2.gguf", folder / "enginehouse.toml"
    if request.param != "llamacpp":
        model = request.getfixturevalue("smollm2_folder")
    else:
        model.symlink_to(request.getfixturevalue("smollm2_gguf"))  # its first layers are kept beside it
    untouched = f"[models.untouched]\nsource = '{model}'\ncontext = 1024\n{BACKENDS[request.param]}"
    config.write_text(one_model_in_all_ways(model, BACKENDS[request.param]) + untouched, encoding="utf-8")
    with started_server("--config", config) as process:
        found = Server.connect(process.url, "plain")
        with found.client:
            found.wait_ready()
            yield found


def ask(server: Server, prompt: Prompt, model: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    headers = {"X-Enginehouse-Details": "true"}
    body = prompt.body(model, max_tokens)
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers, timeout=600)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    return data["choices"][0]["message"]["content"], data["enginehouse"]["optimizations"]


def ask_all(server: Server, prompts: Sequence[Prompt], model: str, max_tokens: int, at_once: int) -> Answers:
    with ThreadPoolExecutor(at_once) as pool:
        answers = pool.map(lambda prompt: (prompt.name, ask(server, prompt, model, max_tokens)), prompts)
        return dict(answers)


def check(server: Server, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Answers]:
    plain = ask_all(server, prompts, "plain", max_tokens, 1)
    ways: dict[str, Answers] = {}
    for model in list(WAYS)[1:]:
        for way, at_once in ((f"{model}, one by one", 1), (f"{model}, from a warm cache, at once", 8)):
            began = time.monotonic()
            ways[way] = answers = ask_all(server, prompts, model, max_tokens, at_once)
            differ = [name for name in plain if answers[name][0] != plain[name][0]]
            assert not differ, f"{way}: {differ}"
            drafted = sum(saved["drafted_tokens"] for _, saved in answers.values())
            accepted = sum(saved["accepted_draft_tokens"] for _, saved in answers.values())
            told = f"{way}: {len(answers)} texts equal; {drafted} tokens drafted, {accepted} right"
            print(f"{told}; {time.monotonic() - began:.0f} s", flush=True)
    return ways


@pytest.mark.timeout(1800)  # on hf and mlx, beside other work
def test_a_few_prompts(server: Server) -> None:
    ways = check(server, FEW, 16)

    drafted = {way: sum(saved["drafted_tokens"] for _, saved in answers.values()) for way, answers in ways.items()}
    assert drafted["cached, one by one"] == 0
    assert drafted["lookup, one by one"] > 0
    assert drafted["second, one by one"] > 0
    assert drafted["layers, one by one"] > 0


def test_an_answer_that_was_predicted(server: Server) -> None:
    """The model that gets the prediction has served nothing yet: core drafts until it has measured several sizes."""
    text, _ = ask(server, PROMPTS[0], "plain", 60)
    predicted = Prompt("predicted", PROMPTS[0].messages, {"prediction": {"type": "content", "content": text}})
    again, saved = ask(server, predicted, "untouched", 60)

    assert again == text
    assert saved["accepted_draft_tokens"] > 30
    assert saved["drafted_tokens"] >= saved["accepted_draft_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_forty_prompts(server: Server) -> None:
    check(server, PROMPTS, 64)
