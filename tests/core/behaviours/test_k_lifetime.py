"""Group K at the HTTP level: clients that leave."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from .client import Server
from .conftest import and_gemma

NEARLY_EQUAL = 1e-3
"""Difference of log-probabilities, some thirty times what rounding changes in float32."""


Drawn = list[tuple[str, float]]
"""The tokens of an answer with their log-probabilities."""


def check_not_mixed(server: Server, bodies: list[dict]) -> list[str]:
    """Every body gets the same answer alone as among the others, half of them streamed; returns the texts.

    Tokens are drawn in the order of their probability. Where numbers are rounded differently in another batch, two
    tokens that are nearly equally probable may swap places, and the other one is drawn: in few answers, if at all.
    """

    def ask(number: int) -> tuple[str, Drawn]:
        if number % 2:
            stream = server.stream_complete(**bodies[number])
            parts = [choice["logprobs"] for choice in stream.choices(0) if choice["logprobs"]]
            text = stream.text()
        else:
            choice = server.complete(**bodies[number])["choices"][0]
            text, parts = choice["text"], [choice["logprobs"]]
        return text, [pair for part in parts for pair in zip(part["tokens"], part["token_logprobs"], strict=True)]

    alone = [ask(number) for number in range(len(bodies))]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(ask, range(len(bodies))))

    num_swapped = 0
    for (text, drawn), (text_together, drawn_together) in zip(alone, together, strict=True):
        is_same = [one[0] == other[0] for one, other in zip(drawn, drawn_together, strict=False)]
        place = is_same.index(False) if False in is_same else None
        if place is not None and server.model in ("hf", "mlx"):
            assert abs(drawn[place][1] - drawn_together[place][1]) < NEARLY_EQUAL
            num_swapped += 1
        else:
            assert text_together == text and len(drawn) == len(drawn_together)
        pairs = zip(drawn[:place], drawn_together[:place], strict=True)
        assert all(abs(one[1] - other[1]) < server.rounding for one, other in pairs)
    assert num_swapped <= 2
    return [text for text, _ in alone]


def token_of(server: Server, text: str) -> int:
    """The last token of a short text."""
    return int(server.post("/tokenize", {"model": server.model, "content": text}).json()["tokens"][-1])


@and_gemma("model_server")
def test_h32_requests_do_not_mix_distinguished_by_bias(model_server: Server) -> None:
    letters = [token_of(model_server, letter) for letter in "abcdefghijklmnop"]
    bodies = [
        {"prompt": f"Request {number}. " * (1 + number), "logit_bias": {str(token_id): 100}, "max_tokens": 6}
        for number, token_id in enumerate(letters)
    ]
    texts = check_not_mixed(model_server, [body | {"logprobs": 0} for body in bodies])
    assert len(set(texts)) == 16


@and_gemma("model_server", need_equal_text=True)
def test_h32_requests_do_not_mix_distinguished_by_seed(model_server: Server) -> None:
    bodies = [
        {
            "prompt": f"Request {number}. " * (1 + number),
            "temperature": 1,
            "seed": number,
            "max_tokens": 12,
            "stop": "z",
        }
        for number in range(16)
    ]
    check_not_mixed(model_server, [body | {"logprobs": 0} for body in bodies])


@and_gemma("model_server")
@pytest.mark.llguidance
def test_h32_requests_do_not_mix_distinguished_by_forced_text(model_server: Server) -> None:
    """Prompts of 5 to 155 words, each with an answer of its own."""

    def form(number: int) -> dict:
        schema = {"type": "string", "const": f"answer {number}"}
        return {"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}

    bodies = [
        {
            "prompt": f"{number}:" + " a" * (5 + 10 * number),
            "response_format": form(number),
            "max_tokens": 40,
            "logprobs": 0,
        }
        for number in range(16)
    ]
    texts = check_not_mixed(model_server, bodies)
    assert texts == [f'"answer {number}"' for number in range(16)]


def leave_after(server: Server, num_chunks: int, **fields) -> None:
    body = server.chat_body(stream=True, max_tokens=1_000_000, ignore_eos=True, **fields)
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for number, _ in enumerate(response.iter_raw()):
            if number + 1 >= num_chunks:
                return


def check_slot_is_free(server: Server) -> None:
    began = time.perf_counter()
    server.chat(max_tokens=4)
    assert time.perf_counter() - began < 60


@and_gemma("server")
def test_h33_leaving_a_stream_frees_the_slot(server: Server) -> None:
    leave_after(server, 3)
    check_slot_is_free(server)


def test_h33_fifty_aborted_streams(server: Server) -> None:
    for _ in range(50):
        leave_after(server, 1)
    check_slot_is_free(server)


def test_h33_one_slot(scripted) -> None:
    server = scripted("endless")
    for _ in range(10):
        leave_after(server, 3)
        check_slot_is_free(server)


@and_gemma("model_server", need_equal_text=True)
def test_h34_prefix_cache_changes_only_speed(model_server: Server) -> None:
    long = "The harbour lay quiet under the fog, and nobody spoke of the night before. " * 4
    salt = {"cache_salt": str(time.time_ns())}

    def ask(prompt: str) -> tuple[str, list[float], int, int]:
        answer = model_server.complete(prompt=prompt, max_tokens=4, logprobs=0, **salt)
        choice, usage = answer["choices"][0], answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return choice["text"], choice["logprobs"]["token_logprobs"], usage["prompt_tokens"], cached

    first, _, repeat = ask(long), ask("Something else entirely."), ask(long)
    other_end = ask(long + " Then")
    half = ask(long[: len(long) // 2] + "stopped.")

    assert first[3] == 0
    assert 0 < repeat[3] < repeat[2] == first[2]
    assert repeat[0] == first[0] != ""
    assert all(abs(a - b) < model_server.rounding for a, b in zip(first[1], repeat[1], strict=True))
    assert 0 < half[3] < other_end[3] <= other_end[2]


@and_gemma("model_server")
def test_h34_a_salt_shares_nothing_with_others(model_server: Server) -> None:
    prompt = f"A prompt that nobody has asked before: {time.time_ns()}. " * 4
    cached = []
    for salt in ("", "a", "b", "a"):
        answer = model_server.complete(prompt=prompt, max_tokens=1, cache_salt=salt)
        usage = answer["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2)

    assert cached == [False, False, False, True]
