"""Seed 004: the chat completions of oMLX."""

import json
from collections.abc import Callable

import httpx
import openai
import pytest

from .page import Page, shape

PROFILE = "omlx"
Post = Callable[..., httpx.Response]


@pytest.mark.llamacpp
def test_example(page: Page) -> None:
    answer = json.loads(page.run("chat.sh"))

    assert shape(answer) == shape(json.loads(page.read("response.json")))
    assert answer["model"] == "your-model"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.llamacpp
def test_models_lists_the_alias(page: Page) -> None:
    listed = httpx.get(f"{page.url}/v1/models", timeout=20).json()["data"]

    assert "your-model" in [name for model in listed for name in (model["id"], *model["aliases"])]


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"seed": 5, "stop": ["\n\n"]},
        {"presence_penalty": 0.2, "frequency_penalty": 0.2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"thinking_budget": None},
        pytest.param({"structured_outputs": {"regex": "[0-9]{3}"}}, marks=pytest.mark.llguidance),
        pytest.param({"structured_outputs": {"choice": ["yes", "no"]}}, marks=pytest.mark.llguidance),
        pytest.param({"structured_outputs": {"json": {"type": "boolean"}}}, marks=pytest.mark.llguidance),
        pytest.param({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, marks=pytest.mark.llguidance),
    ],
)
def test_parameters_through_the_openai_client(page: Page, fields) -> None:
    with openai.OpenAI(base_url=f"{page.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(
            model="your-model",
            messages=[{"role": "user", "content": "Is 7 a prime number?"}],
            max_tokens=16,
            extra_body=fields,
        )

    assert answer.choices[0].message.content


def test_shape_of_a_response(post: Post, scripted: Page) -> None:
    answer = post().json()

    assert shape(answer) == shape(json.loads(scripted.read("response.json")))
    message = {"role": "assistant", "content": "Code flows.", "reasoning_content": None, "tool_calls": None}
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]


def test_streams_and_timed_responses_have_times(post: Post) -> None:
    names = {"model_load_duration", "time_to_first_token", "total_time", "prompt_eval_duration", "generation_duration"}
    names |= {"prompt_tokens_per_second", "generation_tokens_per_second"}
    *_, last, _ = post(stream=True, stream_options={"include_usage": True}).text.strip().split("\n\n")
    timed = post(timings_per_token=True).json()

    for usage in (json.loads(last.removeprefix("data: "))["usage"], timed["usage"]):
        assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens", *names}
        assert 0 < usage["time_to_first_token"] <= usage["total_time"]
        assert usage["generation_duration"] <= usage["total_time"]
    assert timed["timings"]["predicted_n"] == timed["usage"]["completion_tokens"]


def test_default_of_max_tokens(client: httpx.Client) -> None:
    card = client.get("/v1/models/endless").json()

    assert card["max_context"] == 50_000
    assert card["parameters"]["max_tokens"] == {"value": 32768, "origin": "profile"}


@pytest.mark.parametrize("url", ["data:image/jpeg;base64,/9j/4AAQSk...", "https://example.com/cat.jpg"])
@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_vision_inputs_are_refused_by_name(post: Post, scripted: Page, url: str, detail: str) -> None:
    message = json.loads(scripted.read("vision_message.json"))
    message["content"][1]["image_url"] = {"url": url, "detail": detail}
    response = post(messages=[message])

    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "messages[0].content[1]"
    assert error["code"] == "unsupported_parameter" and "image_url" in error["message"]
