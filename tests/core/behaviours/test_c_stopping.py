"""Group C: stop strings and limits."""

import re

import pytest

from .client import Server, check_client_error

CONTROL_TEXT = re.compile(r"<\|im_end\|>|<\|im_start\|>|<end_of_turn>|</s>|<\|eot_id\|>|<\|endoftext\|>")


@pytest.mark.parametrize("stop", [["green blu"], "green blu", ["unseen", "green blu", "violet"]])
def test_h06_stop_string_over_several_tokens(scripted, stop) -> None:
    server = scripted("colours")
    whole = server.chat(stop=stop)
    stream = server.stream_chat(stop=stop, stream_options={"include_usage": True})

    assert whole["choices"][0]["message"]["content"] == stream.text() == '"red '
    assert whole["choices"][0]["finish_reason"] == stream.finish_reason() == "stop"
    assert whole["usage"]["completion_tokens"] == stream.usage["completion_tokens"] == 4
    assert server.complete(stop=stop)["choices"][0]["text"] == '"red '
    assert server.stream_complete(stop=stop).text() == '"red '


def test_h06_stop_string_first_in_the_output(scripted) -> None:
    server = scripted("green")

    answer = server.chat(stop=["green blu"])
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert server.stream_chat(stop=["green blu"]).text() == ""
    assert server.chat(stop=["blue"])["choices"][0]["message"]["content"] == "green "


def test_h06_generation_really_ends(scripted) -> None:
    stream = scripted("endless").stream_chat(stop=["tick tick"], max_tokens=1_000_000)

    assert stream.text() == " "


@pytest.mark.parametrize(("stop", "text"), [("neering", '"mountai'), ("quip", '"mountaineering e')])
def test_h07_stop_string_inside_a_token(scripted, stop: str, text: str) -> None:
    server = scripted("mountain")

    assert server.chat(stop=[stop])["choices"][0]["message"]["content"] == text
    stream = server.stream_chat(stop=[stop])
    assert stream.text() == text
    assert stream.finish_reason() == "stop"


def test_h07_what_only_looks_like_a_stop_string_is_delivered(scripted) -> None:
    server = scripted("colours")

    assert server.stream_chat(stop=['orange" and more']).text() == '"red green blue violet orange"'


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_h08_token_limit(server: Server, name: str) -> None:
    answer = server.chat(**{name: 7})
    choice = answer["choices"][0]

    assert answer["usage"]["completion_tokens"] <= 7
    if choice["finish_reason"] == "length":
        assert answer["usage"]["completion_tokens"] == 7
    else:
        assert choice["finish_reason"] == "stop"
    assert not CONTROL_TEXT.search(choice["message"]["content"])
    assert server.stream_chat(**{name: 7}).text() == choice["message"]["content"]


def test_h08_two_limits(server: Server) -> None:
    check_client_error(server.try_chat(max_tokens=7, max_completion_tokens=9), "max_completion_tokens")
    assert server.chat(max_tokens=3, max_completion_tokens=3)["usage"]["completion_tokens"] <= 3


def test_h08_text_that_ends_by_itself(scripted) -> None:
    answer = scripted("short").chat()
    stream = scripted("short").stream_chat(max_tokens=100)

    assert answer["choices"][0]["finish_reason"] == stream.finish_reason() == "stop"
    assert answer["choices"][0]["message"]["content"] == stream.text() == "Hello there."


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [-5, 0, "7", 1.5, True, [], 2**70])
def test_h08_wrong_limits(server: Server, name: str, value) -> None:
    check_client_error(server.try_chat(**{name: value}), name)
    check_client_error(server.try_chat(**{name: value}, stream=True), name)
