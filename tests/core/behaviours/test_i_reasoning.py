"""Group I: reasoning, told from the answer, switched, limited and counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server_thread import server_thread

from .client import Server, Stream, check_client_error

CLOSED = ["<think>", "plan A", "</think>", "\n\n", "Answer 7"]
NEVER = ["<think>", *(f" thought{n}" for n in range(40))]
LONG = ["<think>\n", *(f" thought{n}" for n in range(40)), "\n</think>", "\n\n", "So", " it", " is", " 7."]
AFTER_OPEN = LONG[1:]
IN_CHANNELS = [
    "<|channel|>analysis<|message|>",
    *LONG[1:-6],
    "<|end|>",
    "<|start|>assistant<|channel|>final<|message|>",
]
IN_CHANNELS += LONG[-4:]

BASE = "{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }}]{% endfor %}"
TEMPLATES = {
    # The model opens its reasoning, and the template can close it beforehand.
    "by_model": BASE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    # The template opens the reasoning, and knows no switch.
    "by_template": BASE + "<think>\n",
    # That of gpt-oss, whose reasoning is a channel.
    "by_channel": BASE + "{# <|channel|>analysis<|message|> #}",
    # The template knows how hard to think.
    "effort": "{{ reasoning_effort or 'usual' }}{% if '</think>' in '' %}{% endif %}" + BASE,
}
SCRIPTS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "closed": ("by_model", CLOSED, {}),
    "never": ("by_model", NEVER, {}),
    "long": ("by_model", LONG, {}),
    "open": ("by_template", AFTER_OPEN, {}),
    "open_fours": ("by_template", AFTER_OPEN, {"tokens_per_step": 4}),
    "channels": ("by_channel", IN_CHANNELS, {}),
    "effort": ("effort", CLOSED, {}),
    "answer": ("by_model", ["Answer", " 7"], {}),
}


def _cuts() -> Iterator[list[str]]:
    """The closed block as one token per character, in tokens of two to five, and cut once at every place."""
    text = "".join(CLOSED)
    for size in range(1, 6):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    yield [text]


def _settings(folder: Path, **server: Any) -> Settings:
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
    cuts = {f"cut{n}": ("by_model", tokens, {}) for n, tokens in enumerate(_cuts())}
    models = {
        name: ModelSettings(
            source=write_script(folder / f"{name}.json", tokens, **options),
            backend="scripted",
            chat_template=str(folder / f"{template}.jinja"),
        )
        for name, (template, tokens, options) in {**SCRIPTS, **cuts}.items()
    }
    models["plain"] = ModelSettings(source=write_script(folder / "plain.json", ["Answer 7"]), backend="scripted")
    for name in ("by_model", "by_template"):
        models[f"fake_{name}"] = ModelSettings(
            source=str(folder),
            backend="fake",
            isolation="thread",
            context=4096,
            chat_template=str(folder / f"{name}.jinja"),
        )
    plugins = PluginsSettings(allow=("parsers", "llguidance"))
    return Settings(models=models, plugins=plugins, server=ServerSettings(**server))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Call it with the name of a model."""
    with server_thread(_settings(tmp_path_factory.mktemp("thinking"))) as running:
        server = Server.connect(running.url, "closed")
        with server.client as client:
            server.wait_ready()
            yield lambda model: Server(client, model)


def said(message: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and answer."""
    return message["reasoning_content"] or "", message["content"] or ""


def streamed(stream: Stream) -> tuple[str, str]:
    deltas = [choice["delta"] for choice in stream.choices()]
    assert not any("<think" in str(delta.values()) or "think>" in str(delta.values()) for delta in deltas)
    assert all(delta.get("reasoning_content") != "" for delta in deltas)
    return tuple("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


def both(server: Server, **fields: Any) -> tuple[tuple[str, str], str, dict[str, Any]]:
    """What an answer says in both modes alike, its finish reason and its usage."""
    whole = server.chat(**fields)
    stream = server.stream_chat(stream_options={"include_usage": True}, **fields)
    choice = whole["choices"][0]
    assert streamed(stream) == said(choice["message"])
    assert stream.finish_reason() == choice["finish_reason"]
    assert stream.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert stream.usage[name] == whole["usage"][name]
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] <= whole["usage"]["completion_tokens"]
    return said(choice["message"]), choice["finish_reason"], whole["usage"]


# -- H24 ----------------------------------------------------------------------------------------------


def test_h24_closed_block_however_it_is_cut(thinking) -> None:
    for number, _ in enumerate(_cuts()):
        answer, reason, _ = both(thinking(f"cut{number}"))

        assert answer == ("plan A", "Answer 7")
        assert reason == "stop"


@pytest.mark.parametrize("model", ["open", "open_fours", "long"])
def test_h24_opened_by_the_template_or_by_the_model(thinking, model: str) -> None:
    (reasoning, content), reason, usage = both(thinking(model))

    assert reasoning == "".join(AFTER_OPEN[:40]).strip() and content == "So it is 7."
    assert reason == "stop"
    assert 40 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 41


def test_h24_reasoning_streams_as_it_comes(thinking) -> None:
    stream = thinking("open").stream_chat()

    assert sum("reasoning_content" in choice["delta"] for choice in stream.choices()) >= 38


def test_h24_answers_without_reasoning_say_null(thinking) -> None:
    message = thinking("answer").chat()["choices"][0]["message"]

    assert message["reasoning_content"] is None and message["content"] == "Answer 7"
    assert all("reasoning_content" not in c["delta"] for c in thinking("answer").stream_chat().choices())


@pytest.mark.parametrize(
    ("name", "fields"), [("reasoning", ["reasoning"]), ("both", ["reasoning_content", "reasoning"])]
)
def test_h24_the_field_has_the_name_that_the_server_gives_it(tmp_path: Path, name: str, fields: list[str]) -> None:
    with server_thread(_settings(tmp_path, reasoning_field=name)) as running:
        server = Server.connect(running.url, "closed")
        with server.client:
            server.wait_ready()
            message = server.chat()["choices"][0]["message"]
            deltas = [choice["delta"] for choice in server.stream_chat().choices()]

    for field in ("reasoning_content", "reasoning"):
        assert message.get(field) == ("plan A" if field in fields else None)
        assert "".join(delta.get(field, "") for delta in deltas) == ("plan A" if field in fields else "")


def test_h24_log_probabilities_are_those_of_the_answer(thinking) -> None:
    whole = thinking("long").chat(logprobs=True)["choices"][0]
    stream = thinking("long").stream_chat(logprobs=True)

    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in stream.logprobs()] == ["So", " it", " is", " 7."]


def test_h24_openai_client(thinking) -> None:
    with openai.OpenAI(base_url=f"{thinking('closed').url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(model="closed", messages=[{"role": "user", "content": "a"}], stream=True)
        )

    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks) == "plan A"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Answer 7"


# -- H25 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [2, 3, 10, 30])
def test_h25_never_closed(thinking, max_tokens: int) -> None:
    (reasoning, content), reason, usage = both(thinking("never"), max_tokens=max_tokens)

    assert reasoning == "".join(NEVER[1:max_tokens]).strip() and content == ""
    assert reason == "length"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == max_tokens - 1
    assert usage["completion_tokens"] == max_tokens


def test_h25_can_be_sent_back(thinking) -> None:
    server = thinking("never")
    message = server.chat(max_tokens=5)["choices"][0]["message"]
    turns = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Go on."}]

    assert server.try_chat(messages=turns, max_tokens=3).status_code == 200
    without = [turns[0], {**message, "reasoning_content": None}, turns[2]]
    usages = [server.chat(messages=some, max_tokens=3)["usage"]["prompt_tokens"] for some in (turns, without)]
    assert usages[0] > usages[1], "the template shows earlier reasoning"
    other_name = [turns[0], {"role": "assistant", "content": "", "reasoning": message["reasoning_content"]}, turns[2]]
    assert server.chat(messages=other_name, max_tokens=3)["usage"]["prompt_tokens"] == usages[0]


# -- H26 ----------------------------------------------------------------------------------------------

OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"reasoning_effort": "none"},
    {"thinking_budget": 0},
]


@pytest.mark.parametrize("fields", [*OFF, {"reasoning_effort": "minimal"}])
def test_h26_off_uses_the_templates_own_form(thinking, fields) -> None:
    server = thinking("answer")
    usual = server.chat()["usage"]["prompt_tokens"]

    assert server.chat(**fields)["usage"]["prompt_tokens"] == usual + len("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("fields", OFF)
@pytest.mark.parametrize("model", ["long", "open", "open_fours", "never"])
def test_h26_off_means_no_reasoning_whatever_the_model_wants(thinking, fields, model: str) -> None:
    (reasoning, content), _, usage = both(thinking(model), **fields)

    assert reasoning == ""
    assert content == ("" if model == "never" else "So it is 7.")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("model", ["long", "open", "open_fours", "channels"])
def test_h26_budget(thinking, model: str) -> None:
    (reasoning, content), reason, usage = both(thinking(model), thinking_budget=16)

    assert usage["completion_tokens_details"]["reasoning_tokens"] == 16
    assert 15 <= reasoning.count("thought") <= 16
    assert content == "So it is 7." and reason == "stop"


@pytest.mark.parametrize("budget", [-1, None, 1000])
def test_h26_no_limit(thinking, budget) -> None:
    (reasoning, _), _, _ = both(thinking("open"), thinking_budget=budget)

    assert reasoning.count("thought") == 40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": 0.6}, "thinking_budget"),
        ({"thinking_budget": "16"}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"thinking_budget": 2**40}, "thinking_budget"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"enable_thinking": True, "thinking_budget": 0}, "thinking_budget"),
        ({"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"raise_exception": "x"}}, "chat_template_kwargs.raise_exception"),
        ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 40_000}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h26_wrong_values(thinking, fields, param: str, stream: bool) -> None:
    check_client_error(thinking("closed").try_chat(**fields, stream=stream), param)


def test_h26_effort_reaches_templates_that_know_it(thinking) -> None:
    server = thinking("effort")

    def prompt(**fields: Any) -> int:
        return server.chat(**fields)["usage"]["prompt_tokens"] - len("usual")

    base = prompt()
    for effort in ("minimal", "low", "medium", "high", "xhigh"):
        assert prompt(reasoning_effort=effort) == base + len(effort) - len("usual")
    assert prompt(chat_template_kwargs={"reasoning_effort": "custom"}) == base + len("custom") - len("usual")


def test_h26_template_variables(thinking, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ flavour | tojson }}{{ messages[0].content }}")
    script = write_script(tmp_path / "s.json", ["x"])
    model = ModelSettings(source=script, backend="scripted", chat_template=str(tmp_path / "t.jinja"))
    with server_thread(Settings(models={"m": model}, plugins=PluginsSettings(allow=("parsers",)))) as running:
        server = Server.connect(running.url, "m")
        with server.client:
            server.wait_ready()
            for value in ("sweet", {"a": [1, None]}, None, 2.5):
                tokens = server.chat(chat_template_kwargs={"flavour": value})["usage"]["prompt_tokens"]
                assert tokens == len(json.dumps(value)) + len("Say something.")


@pytest.mark.parametrize(
    "fields", [*OFF, {"thinking_budget": 5}, {"enable_thinking": True}, {"reasoning_effort": "high"}]
)
def test_h26_models_without_reasoning_ignore_the_switch(thinking, fields) -> None:
    answer, reason, usage = both(thinking("plain"), **fields)

    assert answer == ("", "Answer 7") and reason == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert usage["prompt_tokens"] == thinking("plain").chat()["usage"]["prompt_tokens"]


# -- on a model that computes -------------------------------------------------------------------------


def test_h26_budget_of_a_model_that_computes(thinking) -> None:
    """The fake model never stops to think by itself: the budget closes its reasoning, and an answer follows."""
    server = thinking("fake_by_template")
    (reasoning, content), _, usage = both(server, thinking_budget=16, max_tokens=60)

    assert usage["completion_tokens_details"]["reasoning_tokens"] == 16
    assert reasoning and content
    (reasoning, content), _, usage = both(server, thinking_budget=0, max_tokens=30)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    assert reasoning == "" and content


def test_h26_several_choices_have_a_budget_each(thinking) -> None:
    body = {"thinking_budget": 5, "max_tokens": 40, "n": 3, "temperature": 1.0, "seed": 4}
    whole = thinking("fake_by_template").chat(**body)

    assert len({said(choice["message"]) for choice in whole["choices"]}) == 3
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 15


@pytest.mark.llguidance
@pytest.mark.parametrize("model", ["fake_by_template", "fake_by_model"])
@pytest.mark.parametrize("budget", [0, 8])
def test_h26_calls_are_enforced_behind_reasoning(thinking, model: str, budget: int) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    whole = thinking(model).chat(**body, thinking_budget=budget)
    message = whole["choices"][0]["message"]

    assert [call["function"] for call in message["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert bool(message["reasoning_content"]) == bool(budget)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget


def test_sampling_that_bans_nothing_of_the_marker(thinking) -> None:
    """A closing by force holds whatever the seed."""
    for seed, budget in itertools.product(range(3), (1, 3)):
        usage = thinking("fake_by_template").chat(thinking_budget=budget, max_tokens=40, temperature=1.5, seed=seed)[
            "usage"
        ]

        assert usage["completion_tokens_details"]["reasoning_tokens"] <= budget
