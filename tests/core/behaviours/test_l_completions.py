"""Group L: forms of the prompt."""

import pytest

from .client import Server, check_client_error, vocab_size
from .conftest import and_gemma


@and_gemma("server")
def test_h35_string(server: Server) -> None:
    answer = server.complete(max_tokens=3)

    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0]


@and_gemma("server")
def test_h35_choices_are_prompts_times_n(server: Server) -> None:
    answer = server.complete(prompt=["One", "Two and three"], n=2, max_tokens=3, temperature=1)
    alone = [server.complete(prompt=prompt, max_tokens=1) for prompt in ("One", "Two and three")]

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] <= 12


@and_gemma("server", need_equal_text=True)
def test_h35_each_prompt_gets_its_own_answer(server: Server) -> None:
    prompts = ["The sky is", "Two plus two is", "My name is"]
    alone = [server.complete(prompt=prompt, max_tokens=6)["choices"][0]["text"] for prompt in prompts]
    together = server.complete(prompt=prompts, max_tokens=6)
    stream = server.stream_complete(prompt=prompts, max_tokens=6, stream_options={"include_usage": True})

    assert [choice["text"] for choice in together["choices"]] == alone
    assert [stream.text(index) for index in range(3)] == alone
    assert stream.usage == together["usage"] | {"prompt_tokens_details": stream.usage["prompt_tokens_details"]}


@and_gemma("server", need_equal_text=True)
def test_h35_token_ids(server: Server) -> None:
    one = server.complete(prompt=[65, 66, 67], max_tokens=3)
    two = server.complete(prompt=[[65, 66, 67], [68]], max_tokens=3)

    assert one["usage"]["prompt_tokens"] == 3
    assert two["usage"]["prompt_tokens"] == 4
    assert two["choices"][0]["text"] == one["choices"][0]["text"]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [[]],
        [""],
        [-1],
        [[1], []],
        [999_999_999],
        [[1], [999_999_999]],
        ["a", [1]],
        [[1], "a"],
        [1, "a"],
        [1.5],
        [True],
        [2**70],
        {"a": 1},
        5,
        None,
        [None],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h35_wrong_prompts(server: Server, prompt, stream: bool) -> None:
    check_client_error(server.try_complete(prompt=prompt, stream=stream), "prompt")


@and_gemma("model_server")
def test_h35_ids_of_a_text_say_the_same_as_the_text(model_server: Server) -> None:
    text = "Once upon a time, in a small town,"
    token_ids = model_server.post("/tokenize", {"model": model_server.model, "prompt": text}).json()["tokens"]
    of_text = model_server.complete(prompt=text, max_tokens=4)
    of_ids = model_server.complete(prompt=token_ids, max_tokens=4)

    assert of_ids["choices"][0]["text"] == of_text["choices"][0]["text"]
    assert of_ids["usage"]["prompt_tokens"] == of_text["usage"]["prompt_tokens"] == len(token_ids)


@and_gemma("server")
def test_h35_the_vocabulary_size_is_no_token_id(server: Server) -> None:
    size = vocab_size(server)

    check_client_error(server.try_complete(prompt=[size]), "prompt")
    assert server.try_complete(prompt=[size - 1], max_tokens=1).status_code == 200


def test_h35_missing_prompt(server: Server) -> None:
    check_client_error(server.post("/v1/completions", {"model": server.model}), "prompt")
    server.check_alive()
