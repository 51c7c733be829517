"""Group D: n, logit_bias, nulls, ranges, unknown fields."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .client import Server, check_client_error, vocab_size


def test_h09_several_choices(server: Server) -> None:
    answer = server.chat(n=3, temperature=1, max_tokens=8, seed=11)
    one = server.chat(n=1, temperature=1, max_tokens=8, seed=11)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert 3 <= answer["usage"]["completion_tokens"] <= 24
    assert answer["choices"][0]["message"]["content"] == one["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 2}, {"top_k": 0, "min_p": 0}, {"samplers": ["top_p", "temperature"]}], ids=str
)
def test_top_p_of_0_is_the_most_probable_token_each_time(server: Server, fields: dict) -> None:
    """As with OpenAI; in all choices, streamed or not, whatever the seed."""
    fields = {"temperature": 1, "max_tokens": 12, **fields}
    greedy = server.chat(**{**fields, "temperature": 0})["choices"][0]["message"]["content"]

    for choice in server.chat(**fields, top_p=0, n=2, seed=1)["choices"]:
        assert choice["message"]["content"] == greedy
    assert server.stream_chat(**fields, top_p=0, seed=2).text() == greedy
    text = server.complete(**{**fields, "temperature": 0})["choices"][0]["text"]
    assert server.complete(**fields, top_p=0, seed=3)["choices"][0]["text"] == text


def test_h09_tokens_are_summed_over_the_choices(server: Server) -> None:
    answer = server.chat(n=3, temperature=1, max_tokens=8, seed=11, logprobs=True)
    # An end token is counted, but it is no part of the text.
    counts = [len(c["logprobs"]["content"]) + (c["finish_reason"] == "stop") for c in answer["choices"]]

    assert answer["usage"]["completion_tokens"] == sum(counts)


def test_h09_several_choices_streamed(server: Server) -> None:
    stream = server.stream_chat(n=3, temperature=1, max_tokens=8)

    for index in range(3):
        choices = stream.choices(index)
        assert choices[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert stream.finish_reason(index) in ("stop", "length")
        assert choices[-1]["finish_reason"]
        assert stream.text(index)


def test_h09_completions(server: Server) -> None:
    answer = server.complete(n=2, temperature=1, max_tokens=5)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


@pytest.mark.parametrize("n", [0, -1, 1000, "2", 1.5, True])
def test_h09_wrong_n(server: Server, n) -> None:
    check_client_error(server.try_chat(n=n), "n")


def test_h10_wrong_keys_and_values(server: Server) -> None:
    error = check_client_error(server.try_chat(logit_bias={"abc": 1, "-3": 1, "999999999": 2}), "logit_bias")
    assert all(key in error["message"] for key in ("abc", "-3", "999999999"))
    for bias in ({"1": "x"}, {"1": 101}, {"1": -100.5}, {"1": None, "x": 1}, {"": 1}, {"\uff11": 1}, [1]):
        check_client_error(server.try_chat(logit_bias=bias), "logit_bias")


def test_h10_vocabulary_size_is_no_token_id(server: Server) -> None:
    """The first id that is refused is the vocabulary size that the message names."""
    last = vocab_size(server) - 1

    check_client_error(server.try_chat(logit_bias={str(last + 1): 1}), "logit_bias")
    assert server.try_chat(logit_bias={str(last): 0}, max_tokens=1).status_code == 200


def completion_tokens(server: Server, **fields) -> list[str]:
    fields = {"logprobs": 0, "max_tokens": 3, **fields}
    return server.complete(**fields)["choices"][0]["logprobs"]["tokens"]


def find_greedy_token_id(server: Server, prompt: str) -> int:
    """The id of the first greedy token, found by banning ever smaller parts of the vocabulary."""
    first = completion_tokens(server, prompt=prompt, max_tokens=1)
    low, high = 0, vocab_size(server)
    while high - low > 1:
        middle = (low + high) // 2
        banned = {str(token_id): -100 for token_id in range(low, middle)}
        changed = completion_tokens(server, prompt=prompt, max_tokens=1, logit_bias=banned) != first
        low, high = (low, middle) if changed else (middle, high)
    return low


def test_h10_ban(model_server: Server) -> None:
    prompt = "Once upon a time"
    token_id = find_greedy_token_id(model_server, prompt)
    (first,) = completion_tokens(model_server, prompt=prompt, max_tokens=1)
    banned = {str(token_id): -100}

    tokens = completion_tokens(model_server, prompt=prompt, max_tokens=12, logit_bias=banned)
    assert first not in tokens
    stream = model_server.stream_complete(prompt=prompt, max_tokens=12, logit_bias=banned, logprobs=0)
    assert [token for c in stream.choices() if c["logprobs"] for token in c["logprobs"]["tokens"]] == tokens


def test_h10_force(model_server: Server) -> None:
    tokens = completion_tokens(model_server, logit_bias={"70": 100})
    again = completion_tokens(model_server, logit_bias={"71": 100})

    assert len(set(tokens)) == 1 and len(tokens) == 3
    assert len(set(again)) == 1 and set(tokens) != set(again)


def test_h10_a_bias_changes_nothing_of_the_neighbours(model_server: Server) -> None:
    plain = {"prompt": "Once upon a time", "max_tokens": 12}
    biased = plain | {"logit_bias": {"70": 100}}
    alone = completion_tokens(model_server, **plain), completion_tokens(model_server, **biased)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda fields: completion_tokens(model_server, **fields), [plain, biased] * 3))

    assert together == [*alone] * 3
    assert alone[0] != alone[1]


def test_h10_ban_of_everything_is_refused(server: Server) -> None:
    banned = {str(token_id): -100 for token_id in range(vocab_size(server))}

    check_client_error(server.try_chat(logit_bias=banned, stream=True), "logit_bias")


NULLABLE = [
    "stop", "temperature", "top_p", "max_tokens", "max_completion_tokens", "tools", "tool_choice", "response_format",
    "logit_bias", "seed", "n", "stream", "user", "stream_options", "top_k", "min_p", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "metadata", "store", "service_tier",
    "parallel_tool_calls", "functions", "function_call", "modalities", "audio", "prediction", "reasoning_effort",
    "priority", "ignore_eos", "structured_outputs", "chat_template_kwargs",
]  # fmt: skip


def test_h11_null_is_absent(server: Server) -> None:
    for name in NULLABLE:
        body = server.chat_body(max_tokens=1) | {name: None}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == 200, (name, response.text)
        assert "x-enginehouse-ignored" not in response.headers, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 3),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("seed", 2**70),
        ("seed", 1.5),
        ("n", 1000),
        ("top_k", -2),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["x"] * 1000),
        ("priority", "high"),
        ("metadata", {"a": 1}),
        ("metadata", "a"),
        ("cache_salt", "x" * 100_000),
    ],
)
def test_h11_ranges(server: Server, name: str, value) -> None:
    check_client_error(server.try_chat(**{name: value}), name)
    check_client_error(server.try_complete(**{name: value}), name)


def test_h11_logprob_ranges(server: Server) -> None:
    check_client_error(server.try_chat(logprobs=True, top_logprobs=21), "top_logprobs")
    check_client_error(server.try_chat(top_logprobs=2), "top_logprobs")
    check_client_error(server.try_chat(logprobs=False, top_logprobs=2), "top_logprobs")
    check_client_error(server.try_chat(logprobs=2), "logprobs")
    check_client_error(server.try_complete(logprobs=True), "logprobs")
    check_client_error(server.try_complete(logprobs=-1), "logprobs")


def test_h11_unknown_fields_are_listed(server: Server) -> None:
    body = server.chat_body(max_tokens=1, no_such_field=1, user="u", store=True, metadata={"a": "b"})
    body["service_tier"] = "auto"
    body["messages"] = [{"role": "user", "content": "hi", "colour": "red"}]
    body["bad\r\nx-evil: 1, ü"] = 1
    response = server.post("/v1/chat/completions", body)

    assert response.status_code == 200
    ignored = response.headers["x-enginehouse-ignored"]
    assert "no_such_field" in ignored and "messages[0].colour" in ignored
    assert not any(name in ignored for name in ("user", "store", "metadata", "service_tier"))
    assert "x-evil" not in response.headers


def test_h11_very_many_unknown_fields(server: Server) -> None:
    fields = {f"unknown_{n}" * 10: n for n in range(5000)}
    response = server.try_chat(max_tokens=1, **fields)

    assert response.status_code == 200
    assert len(response.headers["x-enginehouse-ignored"]) < 1200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("structured_outputs", {"structural_tag": {"format": {}}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("verbosity", "low"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h11_options_of_later_versions_are_refused_by_name(server: Server, name: str, value, stream: bool) -> None:
    error = check_client_error(server.try_chat(**{name: value}, stream=stream), name)

    assert error["code"] == "unsupported_parameter"
    assert name in error["message"]


def test_h11_options_that_ask_for_nothing_pass(server: Server) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "loglikelihood": False,
    }
    assert server.try_chat(max_tokens=1, **neutral).status_code == 200
    assert server.try_chat(max_tokens=1, tool_choice="none").status_code == 200
    assert server.try_complete(max_tokens=1, echo=False, suffix="", best_of=1).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("messages", [])])
def test_h11_completion_options_that_cannot_be_honoured(server: Server, name: str, value) -> None:
    assert check_client_error(server.try_complete(**{name: value}), name)["code"] == "unsupported_parameter"
