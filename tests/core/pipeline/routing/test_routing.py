"""Routed requests over HTTP: who answers, what is told about it, and what happens when models fail."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve, field, frozen

from enginehouse.contract.errors import ConfigError
from enginehouse.contract.router import Attempt, RouteQuestion, RoutingDecision
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse.settings.optimisations import RouterSettings
from enginehouse_testkit.fake_media import fake_image_file
from enginehouse_testkit.server_thread import server_thread

SMALL_KEY, NO_KEY = "key-of-one-for-small-only", "key-of-one-for-nothing-routed"


@frozen
class Client:
    http: httpx.Client

    def chat(self, model: str | None = "auto", text: str = "Hello", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers={"X-Enginehouse-Details": "true"})

    def route(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
        answer = self.http.post("/v1/route", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_settled(self) -> None:
        deadline = time.monotonic() + 60
        while self.http.get("/health").json()["status"] in ("loading", "restarting"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


Serve = Callable[..., contextlib.AbstractContextManager[Client]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Serve models given as scripts (lists of texts or tokens) or settings, with settings of the router."""

    @contextlib.contextmanager
    def serving(
        models: dict[str, Any],
        router: RouterSettings | None = None,
        registry: Callable[[PluginRegistry], PluginRegistry] = lambda registry: registry,
        **settings: Any,
    ) -> Iterator[Client]:
        served = {name: model_of(tmp_path, name, model) for name, model in models.items()}
        all_settings = Settings(models=served, router=router or RouterSettings(), **settings)
        plugins = registry(PluginRegistry.for_settings(all_settings))
        with server_thread(all_settings, plugins) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            client = Client(http)
            client.wait_settled()
            yield client

    return serving


def model_of(folder: Path, name: str, model: Any) -> ModelSettings:
    if isinstance(model, ModelSettings):
        return evolve(model, source=str(folder))
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"tokens": [{"text": one} if isinstance(one, str) else one for one in model]}))
    return ModelSettings(source=str(file), backend="scripted")


def fake(**options: Any) -> ModelSettings:
    return ModelSettings(source="fake", backend="fake", isolation="thread", options=options)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@frozen
class Fixed:
    """A router that orders models as it was told."""

    names: tuple[str, ...] = ()
    name: str = "fixed"
    api_version: int = 1
    asked: list[RouteQuestion] = field(factory=list)

    def route(self, question: RouteQuestion) -> RoutingDecision:
        self.asked.append(question)
        return RoutingDecision(attempts=tuple(map(Attempt, self.names)), reason="as told")


def with_router(router: Any) -> Callable[[PluginRegistry], PluginRegistry]:
    return lambda registry: evolve(registry, routers={router.name: router})


FIXED = RouterSettings(strategy="fixed")


# -- who answers -----------------------------------------------------------------------------------


def test_auto_asks_the_router_and_the_answer_says_who_it_was(serve: Serve) -> None:
    router = Fixed(("big", "small"))
    with serve({"small": ["s"], "big": ["b"]}, FIXED, with_router(router)) as client:
        answer = client.chat()

    assert said(answer) == "b"
    assert answer.headers["x-octomil-routed-model"] == "big"
    assert answer.json()["model"] == "big"
    routed = answer.json()["enginehouse"]["routed"]
    assert (routed["strategy"], routed["reason"], routed["tried"]) == ("fixed", "as told", [])
    assert [candidate.name for candidate in router.asked[0].candidates] == ["small", "big"]


def test_streams_name_the_model_in_the_header_and_in_the_last_chunk(serve: Serve) -> None:
    with serve({"small": ["s"], "big": ["b", "c"]}, FIXED, with_router(Fixed(("big", "small")))) as client:
        answer = client.chat(stream=True)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    assert answer.headers["x-octomil-routed-model"] == "big"
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]) == "bc"
    assert chunks[-1]["enginehouse"]["routed"]["strategy"] == "fixed"


def test_prompts_of_one_request_go_to_one_model(serve: Serve) -> None:
    router = Fixed(("big", "small"))
    with serve({"small": ["s"], "big": ["b"]}, FIXED, with_router(router)) as client:
        answer = client.http.post("/v1/completions", json={"model": "auto", "prompt": ["x", "y", "z"]})

    assert [choice["text"] for choice in answer.json()["choices"]] == ["b", "b", "b"]
    assert answer.headers["x-octomil-routed-model"] == "big"
    assert len(router.asked) == 1


def test_auto_is_listed_last_where_the_settings_ask_for_a_router(serve: Serve) -> None:
    models = {"small": ["s"], "big": ["b"]}
    with serve(models) as client:
        without = [model["id"] for model in client.http.get("/v1/models").json()["data"]]
    with serve(models, RouterSettings(strategy="load")) as client:
        listed = client.http.get("/v1/models?details=true").json()["data"]
        short = client.http.get("/v1/models").json()["data"]
        shown = client.http.get("/v1/models/auto").json()

    assert without == ["small", "big"]
    assert [model["id"] for model in listed] == ["small", "big", "auto"]
    assert listed[-1] == shown
    assert listed[-1].keys() == listed[0].keys() and short[-1].keys() == short[0].keys()
    assert (shown["state"], shown["max_context"]) == ("ready", listed[0]["max_context"])


def test_named_models_are_not_routed(serve: Serve) -> None:
    router = Fixed(("big",))
    with serve({"small": ["s"], "big": ["b"]}, FIXED, with_router(router)) as client:
        answers = [client.chat("small"), client.chat(None)]

    assert [said(answer) for answer in answers] == ["s", "s"]
    assert all("x-octomil-routed-model" not in answer.headers for answer in answers)
    assert answers[0].json()["enginehouse"]["routed"] is None
    assert router.asked == []


def test_model_of_that_name_comes_before_the_router(serve: Serve) -> None:
    with serve({"small": ["s"], "auto": ["a"]}) as client:
        assert said(client.chat()) == "a"


def test_without_settings_the_load_decides(serve: Serve) -> None:
    with serve({"small": ["s"], "big": ["b"]}) as client:
        answer = client.chat()

    assert answer.json()["enginehouse"]["routed"]["strategy"] == "load"


def test_without_a_router_there_is_no_such_model(serve: Serve) -> None:
    with serve({"small": ["s"]}, plugins=PluginsSettings(deny=("router",))) as client:
        assert client.chat().status_code == 404


def test_octomils_profile_names_what_was_asked_for_and_tells_the_model_in_the_header(serve: Serve) -> None:
    server = ServerSettings(profile="octomil")
    with serve({"small": ["s"], "big": ["b"]}, FIXED, with_router(Fixed(("big",))), server=server) as client:
        answer = client.chat()

    assert answer.json()["model"] == "auto"
    assert answer.headers["x-octomil-routed-model"] == "big"


@pytest.mark.parametrize("router", [Fixed(()), Fixed(("stranger",)), Fixed(None)], ids=["nobody", "stranger", "raises"])  # type: ignore[arg-type]
def test_router_that_fails_is_as_one_without_an_opinion(serve: Serve, router: Fixed) -> None:
    settings = RouterSettings(strategy="fixed", default="big")
    with serve({"small": ["s"], "big": ["b"]}, settings, with_router(router)) as client:
        answer = client.chat()

    assert said(answer) == "b"
    assert "the router failed" in answer.json()["enginehouse"]["routed"]["reason"]


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterSettings(strategy="dificulty"), r"unknown router 'dificulty'.*difficulty"),
        (RouterSettings(models=("smal",)), r"router\.models: no model 'smal' is served.*small"),
        (RouterSettings(default="x"), r"router\.default: no model 'x'"),
        (RouterSettings(fallbacks={"small": ("y",)}), r"router\.fallbacks\.small: no model 'y'"),
    ],
)
def test_settings_that_name_what_does_not_exist_are_refused(serve: Serve, router: RouterSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message), serve({"small": ["s"]}, router):
        pass


def test_settings_of_the_router_that_do_not_suit_the_models_stop_the_start(serve: Serve) -> None:
    """Only where that router decides: rules that nobody reads harm nobody."""
    plugins = PluginsSettings(options={"router": {"rules": [{"model": "bgi"}]}})
    models = {"small": ["s"], "big": ["b"]}
    with (
        pytest.raises(ConfigError, match=r"plugins\.router\.rules\[0\]\.model: 'bgi'.*'big'"),
        serve(models, RouterSettings(strategy="rules"), plugins=plugins),
    ):
        pass
    with serve(models, RouterSettings(strategy="load"), plugins=plugins) as client:
        assert client.chat().status_code == 200


# -- who may and who can ---------------------------------------------------------------------------


def test_keys_get_no_model_that_they_may_not_use(serve: Serve) -> None:
    keys = (
        KeySettings(name="one", key=SMALL_KEY, models=("small",)),
        KeySettings(name="none", key=NO_KEY, models=("other",)),
        KeySettings(name="all", key="key-of-one-for-everything"),
    )
    router = RouterSettings(models=("small", "big"), fallbacks={"small": ("big",)}, strategy="rules", default="big")
    models = {"small": [{"error": "boom"}], "big": ["b"], "other": ["o"]}
    with serve(models, router, auth=AuthSettings(keys=keys)) as client:

        def ask(key: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
            body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], **fields}
            return client.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

        answers = [ask(key) for key in (SMALL_KEY, NO_KEY, "key-of-one-for-everything")]
        explained = ask(SMALL_KEY, "/v1/route")
        named = ask(SMALL_KEY, "/v1/route", model="big")
        listed = {
            key: client.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"]
            for key in (SMALL_KEY, NO_KEY)
        }
        shown = client.http.get("/v1/models/auto", headers={"Authorization": f"Bearer {NO_KEY}"})

    assert [answer.status_code for answer in answers] == [500, 404, 200]  # no fallback to a model that is not allowed
    assert "big" not in explained.text
    assert explained.json()["attempts"] == ["small"]
    assert named.status_code == 404
    # The router is offered only to whom it can give a model.
    assert [model["id"] for model in listed[SMALL_KEY]] == ["small", "auto"]
    assert [model["id"] for model in listed[NO_KEY]] == ["other"]
    assert shown.status_code == 404


def test_model_whose_context_is_too_small_is_passed_over(serve: Serve) -> None:
    router = Fixed(("first", "second"))
    models = {"first": evolve(fake(), context=64), "second": fake()}
    with serve(models, FIXED, with_router(router)) as client:
        answer = client.chat(text="word " * 60)

    # The router does not even hear of it, and so names a stranger: then the default of those that can is taken.
    assert answer.headers["x-octomil-routed-model"] == "second"
    assert answer.json()["enginehouse"]["routed"]["tried"] == []


def test_model_that_cannot_do_what_is_asked_is_left_out(serve: Serve) -> None:
    gaps = fake(infill_tokens=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    body = {"model": "auto", "prompt": "def f(", "suffix": "return x", "max_tokens": 2}
    with serve({"plain": fake(), "gaps": gaps}, RouterSettings(strategy="rules", default="plain")) as client:
        answer = client.http.post("/v1/completions", json=body)

    assert answer.status_code == 200
    assert answer.headers["x-octomil-routed-model"] == "gaps"


def test_what_no_model_can_do_is_refused_by_name(serve: Serve) -> None:
    body = {"model": "auto", "prompt": "def f(", "suffix": "return x"}
    with serve({"small": ["s"], "big": ["b"]}, RouterSettings(strategy="load")) as client:
        answer = client.http.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "suffix"


def test_tools_stay_on_models_whose_template_knows_them(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% for c in"
        ' m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}"}\n</tool_call>{% endfor %}{% endfor %}'
    )
    models = {"plain": fake(), "tools": evolve(fake(), chat_template=str(template))}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with serve(models, RouterSettings(strategy="rules", default="plain")) as client:
        with_tools, without = client.route(tools=[tool]), client.route()

    assert with_tools["attempts"] == ["tools"]
    assert [one["model"] for one in with_tools["candidates"] if one["refused"]] == ["plain"]
    assert without["attempts"] == ["plain", "tools"]


# -- models that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_model_that_fails_before_its_first_word_is_replaced_within_the_request(serve: Serve, stream: bool) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)})
    with serve({"main": [{"error": "boom"}], "spare": ["spare"]}, settings) as client:
        answer = client.chat("main", stream=stream)

    assert answer.status_code == 200
    assert "spare" in answer.text
    assert answer.headers["x-octomil-routed-model"] == "spare"
    assert '"tried":[{"model":"main","reason":"The model failed on this request."}]' in answer.text.replace(
        ": ", ":"
    ).replace(", ", ",")


def test_last_model_of_a_request_answers_without_what_it_does_not_support(serve: Serve) -> None:
    """Where the settings leave that out. A model before it is passed over: the next one may support everything."""
    settings = RouterSettings(fallbacks={"main": ("other", "spare")})
    models = {"main": [{"error": "boom"}], "other": ["other"], "spare": ["spare"]}
    with serve(models, settings, server=ServerSettings(unsupported_parameters="report")) as client:
        answer = client.chat("main", response_format={"type": "json_object"})

    assert said(answer) == "spare"
    assert answer.headers["x-enginehouse-unsupported"] == "response_format"


def test_nothing_switches_once_an_answer_has_started(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)})
    with serve({"main": ["begun", {"delay_s": 0.05}, {"error": "boom"}], "spare": ["spare"]}, settings) as client:
        streamed, whole = client.chat("main", stream=True), client.chat("main")

    assert "begun" in streamed.text
    assert "The model failed on this request." in streamed.text
    assert "spare" not in streamed.text
    assert whole.status_code == 500


def test_model_that_could_not_be_loaded_is_replaced(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)})
    broken = fake(faults={"refuse_to_open": "no such weights"})
    with serve({"main": broken, "spare": ["spare"]}, settings) as client:
        answer = client.chat("main")

    assert said(answer) == "spare"


def test_dead_worker_is_replaced_within_the_request(serve: Serve) -> None:
    """The worker dies of its first step, and nothing replays: somebody else answers the very same request."""
    dying = evolve(fake(faults={"abort_at_step": 1}), isolation="process", replay=False)
    with serve({"main": dying, "spare": ["spare"]}, RouterSettings(fallbacks={"main": ("spare",)})) as client:
        began = time.monotonic()
        answer = client.chat("main")
        waited_s = time.monotonic() - began

    assert said(answer) == "spare"
    assert answer.json()["enginehouse"]["routed"]["tried"][0]["model"] == "main"
    assert waited_s < 30


def test_request_that_kills_workers_reaches_no_other_model(serve: Serve) -> None:
    dying = evolve(fake(faults={"abort_at_token": 119}), isolation="process")
    models = {"main": dying, "spare": evolve(dying)}
    with serve(models, RouterSettings(fallbacks={"main": ("spare",)})) as client:
        answer = client.chat("main", text="w")
        spare = client.chat("spare", text="x", temperature=0)  # drawn texts may hold the token, too

    assert answer.status_code == 422
    assert "spare" not in answer.text
    assert spare.status_code == 200


def test_circuit_of_a_failing_model_opens(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)}, max_failures=2, pause_s=1000)
    with serve({"main": [{"error": "boom"}], "spare": ["spare"]}, settings) as client:
        tried = [len(client.chat("main").json()["enginehouse"]["routed"]["tried"]) for _ in range(4)]
        route = client.route(model="main")

    assert tried == [1, 1, 0, 0]
    assert route["attempts"] == ["spare", "main"]


def test_last_one_is_tried_even_when_it_has_failed(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)}, max_failures=1, pause_s=1000)
    with serve({"main": [{"error": "boom"}], "spare": [{"error": "bang"}]}, settings) as client:
        answers = [client.chat("main") for _ in range(3)]

    assert [answer.status_code for answer in answers] == [500, 500, 500]


def test_full_queue_is_passed_over(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"main": ("spare",)})
    main = evolve(fake(step_delay_s=0.2), slots=1)
    with serve({"main": main, "spare": ["spare"]}, settings, limits=LimitsSettings(max_queue=0)) as client:
        body = {"model": "main", "messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
        with client.http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 200}) as busy:
            lines = busy.iter_lines()
            while '"content"' not in next(lines):
                pass
            with httpx.Client(base_url=client.http.base_url, timeout=60) as other:
                answer = Client(other).chat("main")

    assert said(answer) == "spare"


# -- cascades --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "model"), [(0.0, "small"), (1.0, "big")])
@pytest.mark.parametrize("stream", [False, True])
def test_cascade_goes_on_where_a_model_is_not_sure(serve: Serve, least: float, model: str, stream: bool) -> None:
    plugins = PluginsSettings(options={"router": {"probe_tokens": 4, "min_probability": least}})
    models = {"small": fake(), "big": fake()}
    with serve(models, RouterSettings(strategy="cascade"), plugins=plugins) as client:
        answer = client.chat(stream=stream, max_tokens=12, ignore_eos=True)
        asked = client.chat(max_tokens=12, ignore_eos=True, logprobs=True)
    last = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1:]
    data = last[0] if stream else answer.json()
    routed = data["enginehouse"]["routed"]

    assert answer.headers["x-octomil-routed-model"] == model
    assert data["usage" if not stream else "enginehouse"]
    assert routed["discarded_tokens"] == 0 if model == "small" else routed["discarded_tokens"] >= 4
    assert '"logprob"' not in answer.text  # the probe's figures are nobody else's
    assert asked.json()["choices"][0]["logprobs"]["content"]


def test_cascade_gives_the_same_text_as_the_model_alone(serve: Serve) -> None:
    plugins = PluginsSettings(options={"router": {"min_probability": 0.0}})
    with serve({"small": fake(), "big": fake()}, RouterSettings(strategy="cascade"), plugins=plugins) as client:
        both = [client.chat(model, temperature=0, max_tokens=30, ignore_eos=True) for model in ("auto", "small")]

    assert said(both[0]) == said(both[1])
    assert len({answer.json()["usage"]["completion_tokens"] for answer in both}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_cascade_takes_a_weak_answer_where_no_stronger_model_can_answer(serve: Serve, stream: bool) -> None:
    plugins = PluginsSettings(options={"router": {"probe_tokens": 4, "min_probability": 1.0}})
    router = RouterSettings(strategy="cascade", max_failures=2, pause_s=1000)
    with serve({"small": fake(), "big": [{"error": "boom"}]}, router, plugins=plugins) as client:
        answers = [client.chat(stream=stream, max_tokens=12, ignore_eos=True) for _ in range(3)]
    last = [
        [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith(("{", "data: {"))
        ]
        for answer in answers
    ]
    told = [chunks[-1]["enginehouse"] for chunks in last]

    assert [answer.headers["x-octomil-routed-model"] for answer in answers] == ["small"] * 3
    assert [[one["model"] for one in details["routed"]["tried"]] for details in told] == [["small", "big"]] * 2 + [[]]
    assert told[0]["routed"]["discarded_tokens"] >= 4
    assert told[2]["routed"]["discarded_tokens"] == 0  # nothing is thrown away for a model whose circuit is open
    assert all(chunks[-1]["choices"][0]["finish_reason"] == "length" for chunks in last)


# -- explanations ----------------------------------------------------------------------------------


def test_route_explains_without_asking_any_model(serve: Serve) -> None:
    with serve({"small": [{"error": "asked!"}], "big": ["b"]}, RouterSettings(strategy="difficulty")) as client:
        easy = client.route()
        hard = client.route(messages=[{"role": "user", "content": "Prove it and explain why, step by step."}])
        named = client.route(model="small")
        wrong = client.http.post("/v1/route", json={"messages": "x"})
        absent = client.http.post("/v1/route", json={"model": "absent", "messages": [{"role": "user", "content": "x"}]})
        odd = client.http.post("/v1/route", json={"messages": [{"role": "user", "content": "x", "odd": 1}], "odd": 1})

    assert (easy["model"], easy["attempts"], easy["strategy"]) == ("small", ["small", "big"], "difficulty")
    assert hard["model"] == "big"
    assert hard["features"]["reasoning"] == 1.0
    assert hard["candidates"][1]["score"] == 1.0
    assert (named["model"], named["strategy"]) == ("small", None)
    assert wrong.status_code == 400
    assert absent.status_code == 404
    assert odd.headers["x-enginehouse-ignored"] == "odd, messages[0].odd"


def test_route_explains_what_a_request_gets_that_is_served_without_some_of_its_parameters(serve: Serve) -> None:
    """Where the settings leave out what no model can honour; else both are refused by the same name."""
    wish = {"response_format": {"type": "json_object"}}
    models, router = {"small": ["s"], "big": ["b"]}, RouterSettings(strategy="rules", default="big")
    with serve(models, router, server=ServerSettings(unsupported_parameters="report")) as client:
        answer = client.chat(**wish)
        body = {"messages": [{"role": "user", "content": "Hello"}], **wish}
        explained = client.http.post("/v1/route", json=body)

    assert answer.status_code == explained.status_code == 200, explained.text
    assert answer.headers["x-octomil-routed-model"] == explained.json()["model"] == "big"
    left_out = "x-enginehouse-unsupported"
    assert answer.headers[left_out] == explained.headers[left_out] == "response_format"


def test_route_refuses_what_a_request_would_be_refused_for(serve: Serve) -> None:
    keys = (KeySettings(name="usual", key=SMALL_KEY),)
    body = {"messages": [{"role": "user", "content": "Hello"}], "priority": -1, "model": "auto"}
    with serve({"small": ["s"], "big": ["b"]}, RouterSettings(strategy="load"), auth=AuthSettings(keys=keys)) as client:
        headers = {"Authorization": f"Bearer {SMALL_KEY}"}
        answers = [
            client.http.post(f"/v1/{path}", json=body, headers=headers) for path in ("chat/completions", "route")
        ]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("strategy", ["rules", "load", "difficulty", "cascade"])
def test_decisions_take_less_than_two_milliseconds(serve: Serve, strategy: str) -> None:
    """Those of core included; the fastest of some counts, for the machine may be busy."""
    with serve({"small": ["s"], "big": ["b"]}, RouterSettings(strategy=strategy)) as client:
        text = "Explain why this is slow. " * 2000
        times = [client.route(messages=[{"role": "user", "content": text}])["decision_ms"] for _ in range(20)]

    assert min(times) < 2.0


def of_context(context: int, **options: Any) -> ModelSettings:
    """A fake model, one token for each byte."""
    return ModelSettings(source="fake", backend="fake", context=context, options=options)


@pytest.mark.parametrize("strategy", ["load", None])
def test_a_prompt_that_fits_no_model_is_refused_before_one_is_chosen(serve: Serve, strategy: str | None) -> None:
    with serve({"small": of_context(512), "big": of_context(1024)}, RouterSettings(strategy=strategy)) as client:
        body = {"messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 4}
        for path in ("/v1/route", "/v1/chat/completions"):
            for stream in (False, True) if path.endswith("completions") else (False,):
                answer = client.http.post(path, json={"model": "auto", **body, **({"stream": True} if stream else {})})
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
                assert "1024 tokens" in error["message"], "the largest context of all"


def test_models_that_a_prompt_does_not_fit_are_named_and_not_tried(serve: Serve) -> None:
    with serve({"small": of_context(512), "big": of_context(4096)}, RouterSettings(models=("small", "big"))) as client:
        text = "x" * 1000
        route = client.route(model="auto", messages=[{"role": "user", "content": text}])
        refused = {one["model"]: one["refused"] for one in route["candidates"] if one["refused"]}
        answer = client.chat(text=text).json()

    assert route["attempts"] == ["big"]
    assert "512 tokens" in refused["small"]
    assert answer["model"] == "big"
    assert answer["enginehouse"]["routed"]["tried"] == [], "the same decision, and nothing was tried in vain"


def test_the_text_beside_images_is_counted(serve: Serve) -> None:
    """Each image counts as one token, since images are read after a model is chosen."""
    models = {"small": of_context(512, image_tokens=4), "big": of_context(4096, image_tokens=4)}
    url = "data:image/png;base64," + base64.b64encode(fake_image_file(1)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    with serve(models, RouterSettings(models=("small", "big"))) as client:
        for text, attempts in (("x" * 1000, ["big"]), ("x" * 100, ["small", "big"])):
            content = [image, {"type": "text", "text": text}]
            route = client.route(model="auto", messages=[{"role": "user", "content": content}])
            assert sorted(route["attempts"]) == sorted(attempts)


def test_routes_count_exactly(serve: Serve) -> None:
    """The last prompt that a model answers is the last one that is routed to it; the answer's room does not count."""
    with serve({"one": of_context(2048)}, RouterSettings(strategy="load")) as client:

        def status(path: str, num_chars: int) -> int:
            body = {"model": "auto", "messages": [{"role": "user", "content": "x" * num_chars}], "max_tokens": 500}
            return client.http.post(path, json=body).status_code

        counted = client.http.post("/tokenize", json={"model": "one", "messages": [{"role": "user", "content": "x"}]})
        longest = 2047 - (counted.json()["count"] - 1)
        for path in ("/v1/route", "/v1/chat/completions"):
            assert [status(path, longest), status(path, longest + 1)] == [200, 400], path


def test_named_models_and_those_that_stand_in_are_checked_too(serve: Serve) -> None:
    settings = RouterSettings(fallbacks={"big": ("small", "large"), "small": ("big",)})
    models = {"small": of_context(512), "big": of_context(4096), "large": of_context(4096)}
    with serve(models, settings) as client:
        messages = [{"role": "user", "content": "x" * 1000}]
        route = client.route(model="big", messages=messages)
        named = client.http.post("/v1/route", json={"model": "small", "messages": messages})

    assert route["attempts"] == ["big", "large"]
    assert [one["model"] for one in route["candidates"] if one["refused"]] == ["small"]
    assert named.status_code == 400
    assert named.json()["error"]["code"] == "context_length_exceeded"


def test_what_a_model_cannot_do_is_told_before_what_it_cannot_hold(serve: Serve) -> None:
    gaps = of_context(512, infill_tokens=["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    with serve({"gaps": gaps, "plain": of_context(4096)}, RouterSettings(strategy="load")) as client:
        body = {"model": "auto", "prompt": "x" * 1000, "suffix": "y", "max_tokens": 2}
        refused = client.http.post("/v1/completions", json=body)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded", "the only model that could do it says why not"
