"""``/tokenize``, ``/detokenize``, ``/apply-template``, and the addresses without ``/v1``."""

from __future__ import annotations

import httpx
import pytest

from enginehouse.settings.config import AuthSettings, Settings
from enginehouse_testkit.server_thread import server_thread

from .conftest import CONTEXT, Endpoints

TEXT = "Hello wörld, 日本語 🙂!"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
POSTS = ["/tokenize", "/detokenize", "/apply-template", "/chat/completions", "/completions"]


def test_tokens_give_the_text_back(model: Endpoints) -> None:
    tokens = model.answer("/tokenize", content=TEXT)
    text = model.answer("/detokenize", tokens=tokens["tokens"])

    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == CONTEXT
    assert text == {"content": TEXT, "prompt": TEXT}


def test_prompt_is_tokenized_as_completions_do(model: Endpoints) -> None:
    """vLLM's form has the model's prefix, llama-server's has not."""
    prompt, content = model.tokens(prompt=TEXT), model.tokens(content=TEXT)

    assert len(prompt) == model.complete(prompt=TEXT, max_tokens=1)["usage"]["prompt_tokens"]
    assert prompt[len(prompt) - len(content) :] == content


def test_special_prefix_on_request(fake: Endpoints) -> None:
    without = fake.tokens(content="Hi")

    assert fake.tokens(content="Hi", add_special=True) == fake.tokens(prompt="Hi") != without
    assert fake.tokens(prompt="Hi", add_special_tokens=False) == without
    assert fake.refusal("/tokenize", prompt="Hi", add_special=True, add_special_tokens=False)["param"]


def test_control_tokens_in_a_text(fake: Endpoints) -> None:
    assert len(fake.tokens(content="<|im_end|>")) == 1
    assert len(fake.tokens(content="<|im_end|>", parse_special=False)) == len("<|im_end|>")
    assert len(fake.tokens(content="<|im_end|>", parse_special=True)) == 1


def test_pieces(fake: Endpoints) -> None:
    token_ids = fake.tokens(content="Hé🙃")
    answer = fake.answer("/tokenize", content="Hé🙃", with_pieces=True, return_token_strs=True)

    assert [token["id"] for token in answer["tokens"]] == token_ids
    assert [token["piece"] for token in answer["tokens"][:2]] == ["H", "é"]
    rest = [token["piece"] for token in answer["tokens"][2:]]
    assert bytes(byte for piece in rest for byte in piece).decode() == "🙃"
    assert answer["token_strs"][:2] == ["H", "é"]
    assert answer["token_strs"][2].startswith("bytes:")


def test_messages_are_tokenized_as_chats_are(model: Endpoints) -> None:
    token_ids = model.tokens(messages=MESSAGES)
    chat = model.answer("/v1/chat/completions", messages=MESSAGES, max_tokens=1)

    assert len(token_ids) == chat["usage"]["prompt_tokens"]
    assert model.answer("/v1/chat/completions/input_tokens", messages=MESSAGES) == {"input_tokens": len(token_ids)}
    prompt = model.answer("/apply-template", messages=MESSAGES)["prompt"]
    assert model.answer("/detokenize", tokens=token_ids)["content"] == prompt


def test_template_shows_tools_and_variables(fake: Endpoints) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "description": "Tell the weather."}}
    plain = fake.answer("/apply-template", messages=MESSAGES)["prompt"]
    with_tool = fake.answer("/apply-template", messages=MESSAGES, tools=[tool])["prompt"]

    assert TEXT in plain and "Be brief." in plain
    assert "get_weather" not in plain
    assert "get_weather" in with_tool


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\nOnce"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nOnce"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nOnce"),
        ({"continue_final_message": False}, "Once<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "Once<|im_end|>\n"),
    ],
)
def test_the_last_turn_of_an_assistant_is_continued_or_answered(fake: Endpoints, fields: dict, end: str) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": "Once"}]

    assert fake.answer("/apply-template", messages=chat, **fields)["prompt"].endswith(end)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True},
        {
            "messages": [{"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        {"prompt": "a", "continue_final_message": True},
    ],
)
def test_a_last_turn_that_cannot_be_continued_is_refused_by_name(fake: Endpoints, body: dict) -> None:
    assert fake.refusal("/v1/chat/completions", **body)["param"] == "continue_final_message"


def test_nothing_is_dropped_in_silence(fake: Endpoints) -> None:
    """Fields that cannot matter here are listed."""
    response = fake.post("/tokenize", content="Hi", temperature=0.5, colour="red")
    chat = fake.post("/apply-template", messages=[{**MESSAGES[0], "x": 1}], max_tokens=3)
    back = fake.post("/detokenize", tokens=[72], colour="red", mirostat_tau=3.0)

    assert response.headers["x-enginehouse-ignored"] == "colour, temperature"
    assert back.headers["x-enginehouse-ignored"] == "colour, mirostat_tau"
    assert chat.headers["x-enginehouse-ignored"] == "max_tokens, messages[0].x"
    assert fake.refusal("/tokenize", content="Hi", temperature=9)["param"] == "temperature"


def test_details_tell_control_tokens_of_the_template_from_those_that_the_caller_wrote(fake: Endpoints) -> None:
    written = [{"role": "user", "content": "<|im_end|> is mine"}]
    segments = fake.answer("/tokenize", messages=written, details=True)["details"]["segments"]

    assert "".join(part["text"] for part in segments) == fake.answer("/apply-template", messages=written)["prompt"]
    assert [part["text"] for part in segments if not part["trusted"]] == ["<|im_end|>"]
    assert any("<|im_start|>" in part["text"] for part in segments if part["trusted"])
    plain = fake.answer("/tokenize", content="<|im_end|>", parse_special=False, details=True)["details"]
    assert plain["segments"] == [{"text": "<|im_end|>", "trusted": False}]


def test_details_of_an_engine_that_says_nothing_of_its_cache_are_null(scripted: Endpoints) -> None:
    details = scripted.answer("/tokenize", prompt="Hi", details=True)["details"]

    assert details == {"cached_tokens": None, "segments": [{"text": "Hi", "trusted": True}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "parse_special": True}, "parse_special"),
        ("/tokenize", {"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": [999_999_999]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"prompt": "a"}, "messages"),
        ("/apply-template", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
    ],
)
def test_wrong_bodies_are_refused_by_name(fake: Endpoints, path: str, body: dict, param: str) -> None:
    assert fake.refusal(path, **body)["param"] == param


def test_empty_texts(fake: Endpoints) -> None:
    assert fake.answer("/tokenize", content="") == {"tokens": [], "count": 0, "max_model_len": CONTEXT}
    assert fake.answer("/detokenize", tokens=[])["content"] == ""


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_unknown_models_are_404(fake: Endpoints, path: str) -> None:
    body = {"model": "nobody", "content": "a", "tokens": [1], "messages": MESSAGES}
    wanted = {"/tokenize": ("content",), "/detokenize": ("tokens",), "/apply-template": ("messages",)}[path]
    response = fake.post(path, **{name: body[name] for name in ("model", *wanted)})

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


# -- addresses --------------------------------------------------------------------------------------


def test_every_address_exists_with_and_without_v1(fake: Endpoints) -> None:
    bodies = {
        "/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "temperature": 0},
        "/completions": {"prompt": "Hi", "max_tokens": 4, "temperature": 0},
        "/tokenize": {"content": "Hi"},
        "/detokenize": {"tokens": [72]},
        "/apply-template": {"messages": MESSAGES},
        "/chat/completions/input_tokens": {"messages": MESSAGES},
    }
    for path, body in bodies.items():
        plain, versioned = fake.answer(path, **body), fake.answer(f"/v1{path}", **body)
        for answer in (plain, versioned):
            for varying in ("id", "created", "usage"):
                answer.pop(varying, None)
        assert plain == versioned
    for path in ("/models", "/models/fake"):
        assert fake.client.get(path).json() == fake.client.get(f"/v1{path}").json()
    assert fake.client.get("/models/nobody").status_code == 404


def test_streams_without_v1(fake: Endpoints) -> None:
    assert fake.stream("/chat/completions", messages=MESSAGES, max_tokens=2)[-1] == "[DONE]"


def test_every_address_wants_the_key() -> None:
    settings = Settings(auth=AuthSettings(keys=("secret",)))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        for path in [*POSTS, *(f"/v1{path}" for path in POSTS)]:
            assert client.post(path, json={}).status_code == 401
        for path in ("/models", "/models/x", "/schema", "/schema/openapi.json"):
            assert client.get(path).status_code == 401
        assert client.get("/schema", headers={"authorization": "Bearer secret"}).status_code == 200
