"""Group B: characters, in answers and in requests."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from .client import Server, check_client_error
from .conftest import FORCED

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("model", ["bytes", "thirds"])
def test_h04_characters_split_over_tokens(scripted, model: str) -> None:
    server = scripted(model)

    assert server.chat()["choices"][0]["message"]["content"] == FORCED
    stream = server.stream_chat()
    assert stream.text() == FORCED
    assert "\ufffd" not in stream.body.decode("utf-8")
    assert server.stream_complete().text() == FORCED


def test_h04_four_at_once(scripted) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: scripted("bytes").stream_chat(n=2), range(4)))

    assert [stream.text(index) for stream in texts for index in (0, 1)] == [FORCED] * 8


def test_h04_logprobs_keep_the_bytes_of_split_characters(scripted) -> None:
    stream = scripted("bytes").stream_chat(logprobs=True)

    assert bytes(byte for entry in stream.logprobs() for byte in entry["bytes"]).decode() == FORCED
    assert "\ufffd" not in stream.body.decode("utf-8")


def test_h05_lone_surrogate_in_the_request(server: Server) -> None:
    for text, half in ((r'"\ud83d"', r"\ud83d"), (r'"\\\udc00b"', r"\udc00"), (r'"\ud83d\ude00\ud83d"', r"\ud83d")):
        body = f'{{"model": "{server.model}", "messages": [{{"role": "user", "content": {text}}}]}}'
        response = server.client.post("/v1/chat/completions", content=body, headers=JSON)
        error = check_client_error(response)
        assert (
            error["message"]
            == f"The request body is not valid JSON in UTF-8: {half} is half of a character, which UTF-8 does not have"
        )
    server.check_alive()


@pytest.mark.parametrize("content", ["\x00", "a\x00b", "line\u2028line\r\nline", "🙂" * 10_000, "Привет"])
def test_h05_odd_characters_in_the_request(server: Server, content: str) -> None:
    response = server.try_chat(messages=[{"role": "user", "content": content}], max_tokens=2)

    # 10,000 emoji need not fit the context of a small model.
    too_long = response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert response.status_code == 200 or (too_long and len(content) > 1000), response.text
    server.check_alive()


def test_h05_odd_model_name(server: Server) -> None:
    for name in ("неизвестная", "a\nb", "\x00", "\u2028"):
        error = check_client_error(server.try_chat(model=name), "model", status=404)
        assert error["code"] == "model_not_found"


def test_h05_names_of_other_alphabets(scripted, model_server: Server) -> None:
    answer = scripted("модель").chat()
    assert answer["model"] == "модель" and answer["choices"][0]["message"]["content"] == "Привет"
    assert scripted("модель").stream_chat().events[0]["model"] == "модель"

    function = {"name": "lamp", "description": "Включает лампу в комнате.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    assert model_server.try_chat(tools=tools, max_tokens=4).status_code == 200


def test_h05_line_breaks_in_the_answer_stay_inside_data_lines(scripted) -> None:
    expected = 'a\nb\r\nc\u2028d\x85e\u2029\x00"\\'
    stream = scripted("breaks").stream_chat(logprobs=True)

    assert stream.text() == expected
    assert scripted("breaks").chat()["choices"][0]["message"]["content"] == expected
    # Careless clients split lines wherever Python's splitlines does.
    lines = [line for line in stream.body.decode().splitlines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
