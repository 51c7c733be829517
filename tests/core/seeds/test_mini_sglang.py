"""Seeds 001 and 003: the chat completions of mini-sglang (the second page is the first one's text without its code)."""

import json
from collections.abc import Callable

import httpx
import pytest

from .page import Page

PROFILE = "mini-sglang"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
Post = Callable[..., httpx.Response]


def events(body: str) -> list[dict]:
    assert body.endswith("data: [DONE]\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in body.strip().split("\n\n")[:-1] if block[0] != ":"]


@pytest.mark.llamacpp
def test_chat_completion_with_messages(page: Page) -> None:
    answer = json.loads(page.run("chat.sh"))

    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 100


@pytest.mark.llamacpp
def test_streaming_response(page: Page) -> None:
    chunks = events(page.run("streaming.sh"))

    assert all(chunk["object"] == "text_completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("cmpl-")
    assert chunks[0]["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.llamacpp
@pytest.mark.parametrize("example", ["python_client.py.txt", "python_streaming.py.txt"])
def test_python_openai_client(page: Page, example: str) -> None:
    assert len(page.run(example).split()) > 3


@pytest.mark.llamacpp
def test_raw_prompt(page: Page) -> None:
    answer = json.loads(page.run("raw_prompt.sh"))

    assert answer["choices"][0]["message"]["content"]
    # "Once upon a time" alone: no template, no system message around it.
    assert answer["usage"]["prompt_tokens"] < 8


@pytest.mark.llamacpp
def test_advanced_sampling_parameters(page: Page) -> None:
    """The openai client itself refuses this example, before anything is sent; ``extra_body`` is its way."""
    refused = page.try_run("advanced_sampling.py.txt")
    assert refused.returncode != 0 and "unexpected keyword argument 'top_k'" in refused.stderr

    page.run("advanced_sampling.py.txt", {"top_k=50": 'extra_body={"top_k": 50}'})


def test_shape_of_a_stream(post: Post, scripted: Page) -> None:
    shown = events(scripted.read("streaming_output.txt").rstrip("\n") + "\n\n")
    chunks = events(post(stream=True).text)

    assert {chunk["id"][:5] for chunk in chunks} == {"cmpl-"}
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == [None, "Code", " flows", ".", None]
    same = [{**chunk, "id": "cmpl-1"} for chunk in (*chunks[:3], chunks[-1])]
    assert same == shown


def test_default_of_max_tokens_is_16(post: Post) -> None:
    choice = post(model="endless").json()

    assert choice["usage"]["completion_tokens"] == 16
    assert choice["choices"][0]["finish_reason"] == "length"
    assert post(model="endless", max_tokens=40).json()["usage"]["completion_tokens"] == 40


def test_one_of_messages_and_prompt_is_needed(client: httpx.Client, post: Post) -> None:
    assert post(messages=None, prompt="Once").status_code == 200
    assert post(messages=None).status_code == 400
    assert post(prompt="Once").status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": -1},
        {"top_p": 1.0},
        {"n": 1},
        {"stop": []},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"ignore_eos": True},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters(post: Post, fields, stream: bool) -> None:
    response = post(**fields, stream=stream)

    assert response.status_code == 200
    assert "x-enginehouse-ignored" not in response.headers


@pytest.mark.llamacpp
def test_greedy_decoding_with_temperature_0_or_top_k_1(page: Page) -> None:
    def text(**fields) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say a number."}], **fields}
        answer = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=60).json()
        return answer["choices"][0]["message"]["content"]

    assert text(temperature=0.0) == text(temperature=0.0) == text(top_k=1, seed=1) == text(top_k=1, seed=2)
