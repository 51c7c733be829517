"""Group E: log-probabilities."""

import pytest

from .client import Server


def check_entries(entries: list[dict], num_top: int) -> None:
    for entry in entries:
        assert entry["logprob"] <= 0
        assert all(isinstance(byte, int) for byte in entry["bytes"])
        assert len(entry["top_logprobs"]) == num_top
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        if num_top:
            assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_h12_chat_logprobs(server: Server, num_top: int) -> None:
    choice = server.chat(logprobs=True, top_logprobs=num_top, max_tokens=6)["choices"][0]
    entries = choice["logprobs"]["content"]

    check_entries(entries, num_top)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    stream = server.stream_chat(logprobs=True, top_logprobs=num_top, max_tokens=6)
    check_entries(stream.logprobs(), num_top)
    assert [entry["token"] for entry in stream.logprobs()] == [entry["token"] for entry in entries]
    last = stream.choices(0)[-1]
    assert last["finish_reason"] and last["logprobs"] is None


def test_h12_logprobs_default_to_the_drawn_token_only(server: Server) -> None:
    entries = server.chat(logprobs=True, max_tokens=3)["choices"][0]["logprobs"]["content"]

    check_entries(entries, 0)


def test_h12_no_logprobs(server: Server) -> None:
    assert server.chat(logprobs=False, max_tokens=2)["choices"][0]["logprobs"] is None
    assert server.chat(max_tokens=2)["choices"][0]["logprobs"] is None
    assert all(choice["logprobs"] is None for choice in server.stream_chat(max_tokens=2).choices())


@pytest.mark.parametrize("num_top", [0, 3])
def test_h13_legacy_logprobs(server: Server, num_top: int) -> None:
    answer = server.complete(logprobs=num_top, max_tokens=5)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]

    num_tokens = answer["usage"]["completion_tokens"] - (choice["finish_reason"] == "stop")
    assert {len(values) for values in logprobs.values()} == {num_tokens}
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(
        choice["text"][offset:].startswith(token)
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        if not token.startswith("bytes:")
    )
    for token, ranked in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in ranked
        assert len(ranked) in ((1,) if num_top == 0 else (3, 4))


def test_h13_no_logprobs(server: Server) -> None:
    assert server.complete(logprobs=None, max_tokens=2)["choices"][0]["logprobs"] is None
    assert server.complete(max_tokens=2)["choices"][0]["logprobs"] is None


def test_h13_offsets_count_characters_not_bytes(scripted) -> None:
    choice = scripted("thirds").complete(logprobs=0)["choices"][0]

    assert choice["logprobs"]["text_offset"][0] == 0
    assert max(choice["logprobs"]["text_offset"]) < len(choice["text"])
