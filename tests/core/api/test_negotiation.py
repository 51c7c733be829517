"""What is asked, what applies and what was left out, over HTTP: details, models, report mode, predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from attrs import evolve, frozen

from enginehouse.contract.rows import fields_of
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.server_thread import server_thread

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASK = {"X-Enginehouse-Details": "true"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
WORDS = ["The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", "."]


def serve(folder: Path, plugins: tuple[str, ...], **server: Any) -> Iterator[httpx.Client]:
    script = write_script(folder / "words.json", WORDS)
    recommends = {"temperature": 0.6, "min_p": 0.05, "nonsense": 1, "top_p": 7}
    fake: dict[str, Any] = {"source": str(folder), "backend": "fake", "isolation": "thread", "context": 2048}
    models = {
        "words": ModelSettings(
            source=script,
            backend="scripted",
            aliases=("fast", "plain", "cl*-son*"),
            defaults={"temperature": 0.5, "max_tokens": 50},
            alias_defaults={"fast": {"temperature": 0.1, "top_k": 3}, "cl*-son*": {"temperature": 0.2}},
        ),
        "fake": ModelSettings(**fake, defaults={"min_p": 0.2}, options={"recommends": recommends}),
        "headstrong": ModelSettings(**fake, generation_config=False, options={"recommends": recommends}),
    }
    settings = Settings(models=models, plugins=PluginsSettings(allow=plugins), server=ServerSettings(**server))
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=30) as client:
        while {model["state"] for model in client.get("/v1/models").json()["data"]} != {"ready"}:
            pass
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    yield from serve(tmp_path_factory.mktemp("models"), ("samplers", "parsers", "llguidance"))


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server without plugins that refuses."""
    yield from serve(tmp_path_factory.mktemp("models"), ())


@pytest.fixture(scope="module")
def reporting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server without plugins that leaves out and reports, and tells details unasked."""
    yield from serve(tmp_path_factory.mktemp("models"), (), unsupported_parameters="report", details=True)


def chat(client: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    response = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 8, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def details(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = chat(client, ASK, **fields).json()["enginehouse"]
    return found


def error(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


# -- the member enginehouse ---------------------------------------------------------------------------


def test_the_member_is_there_only_when_asked_for(client: httpx.Client) -> None:
    assert "enginehouse" not in chat(client).json()
    assert "enginehouse" not in chat(client, {"X-Enginehouse-Details": "false"}).json()
    assert not any("enginehouse" in event for event in events(chat(client, stream=True)))
    assert "enginehouse" in chat(client, {"X-Enginehouse-Details": "1"}).json()


def test_a_wrong_header_is_named(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=CHAT, headers={"X-Enginehouse-Details": "maybe"})

    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "X-Enginehouse-Details"
    assert error["message"] == "X-Enginehouse-Details: must be true or false, not 'maybe'"


def test_a_setting_asks_for_all_and_a_header_can_decline(reporting: httpx.Client) -> None:
    assert "enginehouse" in chat(reporting).json()
    assert "enginehouse" not in chat(reporting, {"X-Enginehouse-Details": "0"}).json()


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
def test_a_stream_carries_it_on_the_chunk_that_comes_last_anyway(client: httpx.Client, options: dict[str, Any]) -> None:
    plain = events(chat(client, stream=True, seed=1, **options))
    told = events(chat(client, ASK, stream=True, seed=1, **options))

    assert len(told) == len(plain)
    assert [("enginehouse" in event) for event in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].keys() - plain[-1].keys() == {"enginehouse"}
    assert [event["choices"] for event in told] == [event["choices"] for event in plain]
    whole = details(client, seed=1, n=options.get("n", 1))
    assert told[-1]["enginehouse"]["parameters"].keys() >= whole["parameters"].keys() - {"n"}


def test_completions_have_it_too(client: httpx.Client) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3, "model": "fake"}
    whole = client.post("/v1/completions", json=body, headers=ASK).json()
    stream = events(client.post("/v1/completions", json={**body, "stream": True}, headers=ASK))

    for member in (whole["enginehouse"], stream[-1]["enginehouse"]):
        seeds = member["parameters"]["seed"]
        assert seeds["origin"] == "drawn" and len(set(seeds["value"])) == 2
        assert member["parameters"]["max_tokens"] == {"value": 3, "origin": "request"}


def test_a_stream_that_fails_has_no_member_but_all_its_text(tmp_path: Path) -> None:
    source = write_script(tmp_path / "broken.json", ["Hel", "lo", {"error": "boom"}])
    settings = Settings(models={"m": ModelSettings(source=source, backend="scripted")}, plugins=PluginsSettings())
    with served(settings, timeout=30) as client:
        text = client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=ASK).text

    assert "Hel" in text and '"lo"' in text and "The model failed" in text
    assert "enginehouse" not in text and "[DONE]" not in text


def test_an_alias_with_a_star_is_every_name_of_its_form(client: httpx.Client) -> None:
    named = client.get("/v1/models/cl/x-sonnet").json()

    assert (named["id"], "cl*-son*" in named["aliases"]) == ("words", True)
    assert named["parameters"]["temperature"] == {"value": 0.2, "origin": "alias"}
    for name in ("cl-so", "xcl-son", "son-cl", "CL-SON"):
        assert client.get(f"/v1/models/{name}").status_code == 404
        assert client.post("/v1/chat/completions", json={**CHAT, "model": name}).status_code == 404


def test_each_value_says_where_it_comes_from(client: httpx.Client) -> None:
    own = details(client, model="words", top_p=0.9, n=2)["parameters"]
    by_alias = details(client, model="fast")["parameters"]

    assert own["temperature"] == {"value": 0.5, "origin": "model"}
    assert own["top_p"] == {"value": 0.9, "origin": "request"}
    assert own["repetition_penalty"] == {"value": 1.0, "origin": "built-in"}
    assert own["n"] == {"value": 2, "origin": "request"}
    assert own["stream"] == {"value": False, "origin": "built-in"}
    assert own["xtc_probability"] == {"value": 0.0, "origin": "built-in"}
    assert by_alias["temperature"] == {"value": 0.1, "origin": "alias"}
    assert details(client, model="cl-4-sonnet")["parameters"]["temperature"] == {"value": 0.2, "origin": "alias"}
    assert by_alias["top_k"] == {"value": 3, "origin": "alias"}
    assert by_alias["seed"]["origin"] == "drawn"
    assert details(client, model="plain")["parameters"]["temperature"]["origin"] == "model"


def test_the_model_s_files_recommend_behind_the_settings(client: httpx.Client) -> None:
    """What its files say wrongly is left out, for nobody could repair it."""
    fake = details(client, model="fake")["parameters"]
    headstrong = details(client, model="headstrong")["parameters"]

    assert fake["temperature"] == {"value": 0.6, "origin": "generation_config"}
    assert fake["min_p"] == {"value": 0.2, "origin": "model"}
    assert fake["top_p"] == {"value": 1.0, "origin": "built-in"}
    assert headstrong["temperature"] == {"value": 1.0, "origin": "built-in"}


def test_an_answer_can_be_had_again_with_what_its_details_say(client: httpx.Client) -> None:
    first = chat(client, ASK, model="fake", max_tokens=20).json()
    seed = first["enginehouse"]["parameters"]["seed"]["value"]
    again = chat(client, model="fake", max_tokens=20, seed=seed).json()

    assert again["choices"] == first["choices"]


def test_times_and_savings(client: httpx.Client) -> None:
    long = "All the world's a stage, and all the men and women merely players. " * 5
    fields = {"model": "fake", "messages": [{"role": "user", "content": long}], "max_tokens": 30}
    details(client, **fields)
    told = details(client, **fields)
    times = told["timings_ms"]

    assert set(times) == {"load", "render", "tokenize", "queue", "prefill", "first_token", "decode", "total"}
    assert all(0 <= value <= times["total"] for value in times.values())
    assert 0 < times["prefill"] + times["decode"] <= times["total"]
    assert times["prefill"] <= times["first_token"]
    assert told["optimizations"]["cached_tokens"] > 50
    assert told["tokens_per_second"]["decode"] > 0


@pytest.mark.llguidance
def test_forced_tokens_are_savings(client: httpx.Client) -> None:
    constant = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "one and only"}}}
    forced = details(client, model="fake", response_format=constant, max_tokens=100)
    assert forced["optimizations"]["forced_tokens"] > 0


def test_strict_clients_are_content(client: httpx.Client) -> None:
    """The SDK's models keep members that they do not know; nothing else changes for them."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0) as sdk:
        fields: dict[str, Any] = {"model": "words", "messages": CHAT["messages"], "max_tokens": 8}
        whole = sdk.chat.completions.create(**fields, extra_headers=ASK)
        chunks = list(sdk.chat.completions.create(**fields, stream=True, extra_headers=ASK))

    assert whole.choices[0].message.content == "".join(WORDS[:8])
    assert whole.model_extra is not None and whole.model_extra["enginehouse"]["backend"] == "scripted"
    assert all(chunk.choices for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(WORDS[:8])
    assert chunks[-1].model_extra is not None and chunks[-1].model_extra["enginehouse"]["model"] == "words"


# -- models -------------------------------------------------------------------------------------------


def test_a_model_tells_what_can_be_asked_of_it(client: httpx.Client) -> None:
    model = client.get("/v1/models/fake").json()
    short, long = (
        {entry["id"]: entry for entry in client.get(path).json()["data"]}["fake"]
        for path in ("/v1/models", "/v1/models?details=true")
    )

    assert model == long and short.items() < long.items()
    assert len(json.dumps(short)) < 400 and "capabilities" not in short
    assert client.get("/v1/models?details=yes").json()["error"]["param"] == "details"
    assert (model["backend"], model["max_context"]) == ("fake", 2048)
    assert model["parsers"] == {"tools": "default", "reasoning": None}
    assert len(model["template_hash"]) == 12
    assert model["parameters"]["temperature"] == {"value": 0.6, "origin": "generation_config"}
    assert model["parameters"]["seed"] == {"value": None, "origin": "drawn"}
    assert model["parameters"]["max_tokens"] == {"value": None, "origin": "built-in"}
    capabilities = model["capabilities"]
    assert capabilities["temperature"]["support"] == "emulated"
    assert capabilities["messages"]["support"] == "native"
    assert capabilities["thinking_budget"]["support"] == "accepted"
    assert capabilities["peft"]["support"] == "refused" and "adapters" in capabilities["peft"]["reason"]
    assert all(capability["reason"] for capability in capabilities.values())


def test_an_alias_shows_the_defaults_of_requests_by_its_name(client: httpx.Client) -> None:
    own, fast = (client.get(f"/v1/models/{name}").json() for name in ("words", "fast"))

    assert fast["id"] == "words"
    assert own["parameters"]["temperature"] == {"value": 0.5, "origin": "model"}
    assert fast["parameters"]["temperature"] == {"value": 0.1, "origin": "alias"}


def test_answers_carry_the_fingerprint_of_their_model(client: httpx.Client, poor: httpx.Client) -> None:
    stamp = client.get("/v1/models/fake").json()["system_fingerprint"]

    assert chat(client, model="fake").json()["system_fingerprint"] == stamp
    assert events(chat(client, model="fake", stream=True))[0]["system_fingerprint"] == stamp
    assert client.post("/v1/completions", json={"prompt": "a", "model": "fake"}).json()["system_fingerprint"] == stamp
    # The same model with another set of plugins.
    assert poor.get("/v1/models/fake").json()["system_fingerprint"] != stamp


@pytest.mark.parametrize("name", ["fake", "words"])
def test_what_a_model_refuses_is_refused_and_what_it_takes_is_taken(poor: httpx.Client, name: str) -> None:
    """The table is what decides: each parameter that it lists is tried."""
    capabilities = poor.get(f"/v1/models/{name}").json()["capabilities"]
    tried = {
        "temperature": 0.5,
        "top_k": 3,
        "stop": "x",
        "logit_bias": {"1": 1},
        "tools": [TOOL],
        "response_format": SCHEMA,
        "json_schema": {"type": "object"},
        "structured_outputs": {"regex": "a"},
        "guided_choice": ["a"],
        "guided_regex": "a",
        "grammar": 'root ::= "a"',
        "thinking_budget": 5,
        "enable_thinking": True,
        "reasoning_effort": "low",
        "peft": "x",
        "functions": [1],
        "typical_p": 0.5,
        "prediction": {"type": "content", "content": "x"},
    }
    for field, value in tried.items():
        body = {**CHAT, "model": name, "max_tokens": 2, field: value}
        status = poor.post("/v1/chat/completions", json=body).status_code
        assert status == (400 if capabilities[field]["support"] == "refused" else 200), field


# -- leaving out --------------------------------------------------------------------------------------


def test_what_only_the_pipeline_can_refuse_names_the_parameter_and_says_why(poor: httpx.Client) -> None:
    for field, value in {"response_format": SCHEMA, "guided_regex": "a", "tools": [TOOL]}.items():
        refused = error(poor, model="fake", **{field: value})
        assert (refused["code"], refused["param"]) == ("unsupported_parameter", field)
        whose = "no loaded plugin" if field == "tools" else "no plugin in the model's worker"
        assert refused["message"].startswith(f"{field}: {whose}")
    suffix = poor.post("/v1/completions", json={"prompt": "a", "suffix": "b", "model": "fake"}).json()["error"]
    assert suffix["param"] == "suffix" and "does not support infill" in suffix["message"]


@pytest.mark.parametrize("model", ["fake", "words"])
@pytest.mark.parametrize("stream", [False, True])
def test_report_mode_serves_without_what_only_the_pipeline_can_refuse(
    reporting: httpx.Client, model: str, stream: bool
) -> None:
    fields = {"response_format": SCHEMA, "tools": [TOOL], "tool_choice": "required", "verbosity": "low", "odd": 1}
    response = chat(reporting, model=model, stream=stream, **fields)
    member = events(response)[-1]["enginehouse"] if stream else response.json()["enginehouse"]

    assert response.headers["x-enginehouse-unsupported"] == "verbosity, tools, response_format"
    assert response.headers["x-enginehouse-ignored"] == "odd"
    assert member["unsupported"] == ["verbosity", "tools", "response_format"]
    assert member["ignored"] == ["odd"]


def test_report_mode_leaves_members_and_suffixes_out(reporting: httpx.Client) -> None:
    response = chat(reporting, structured_outputs={"structural_tag": {"a": 1}})
    assert response.headers["x-enginehouse-unsupported"] == "structured_outputs.structural_tag"
    body = {"prompt": "a", "suffix": "b", "model": "fake", "max_tokens": 2}
    assert reporting.post("/v1/completions", json=body).headers["x-enginehouse-unsupported"] == "suffix"
    several = reporting.post("/v1/completions", json={**body, "prompt": ["a", "c"]})
    assert several.headers["x-enginehouse-unsupported"] == "suffix"


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_report_mode_leaves_out_of_prompts_too(reporting: httpx.Client, poor: httpx.Client, path: str) -> None:
    body = {**CHAT, "model": "fake", "tools": [TOOL]}
    response = reporting.post(path, json=body)

    assert response.status_code == 200
    assert response.headers["x-enginehouse-unsupported"] == "tools"
    assert response.json() == reporting.post(path, json={**CHAT, "model": "fake"}).json()
    assert poor.post(path, json=body).json()["error"]["param"] == "tools"


def test_report_mode_does_not_leave_out_what_is_wrong_or_what_is_asked(reporting: httpx.Client) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]

    assert error(reporting, temperature=5)["param"] == "temperature"
    refused = error(reporting, messages=[{"role": "user", "content": image}])
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "messages[0].content[0]")


def test_without_a_decoder_tools_can_be_offered_but_not_required(tmp_path: Path) -> None:
    for mode, status in (("reject", 400), ("report", 200)):
        for client in serve(tmp_path, ("parsers",), unsupported_parameters=mode):
            body = {**CHAT, "model": "fake", "max_tokens": 4, "tools": [TOOL]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            response = client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
            assert response.status_code == status, response.text
            if mode == "reject":
                assert response.json()["error"]["param"] == "tool_choice"
            else:
                assert response.headers["x-enginehouse-unsupported"] == "tool_choice"


@frozen(kw_only=True)
class SpiceFields:
    spice: float = 0.0


class SpiceSampler:
    """A sampler that only the server has: a worker may run in another virtual environment."""

    name = "spicy"
    api_version = 1
    request_fields = SpiceFields
    order = 55

    def create(self, fields: SpiceFields) -> None:
        return None


@pytest.mark.parametrize(("mode", "status"), [("reject", 400), ("report", 200)])
def test_a_sampler_that_the_model_s_worker_lacks(tmp_path: Path, mode: Any, status: int) -> None:
    fake = ModelSettings(source=str(tmp_path), backend="fake", isolation="thread", context=512)
    server = ServerSettings(unsupported_parameters=mode)
    settings = Settings(models={"fake": fake}, plugins=PluginsSettings(allow=()), server=server)
    registry = evolve(
        PluginRegistry.for_settings(settings),
        samplers={"spicy": SpiceSampler()},
        request_fields={field.name: field for field in fields_of(SpiceFields, "spicy", "spices")},
    )
    with served(settings, registry, timeout=30) as client:
        capability = client.get("/v1/models/fake").json()["capabilities"]["spice"]
        response = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2, "spice": 0.5})

    assert capability["support"] == "refused" and "not installed where this model runs" in capability["reason"]
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == "spice"
    else:
        assert response.headers["x-enginehouse-unsupported"] == "spice"


# -- predictions --------------------------------------------------------------------------------------


def counts(response: httpx.Response, *, stream: bool = False) -> tuple[int, int]:
    usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
    found = usage["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def predicted(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    return chat(client, model="fake", temperature=0, prediction={"type": "content", "content": content}, **fields)


def test_a_prediction_is_counted_in_both_modes(client: httpx.Client) -> None:
    answer = chat(client, model="fake", temperature=0, max_tokens=40).json()
    text, used = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    parts = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]
    usage = {"stream_options": {"include_usage": True}, "stream": True}

    accepted, rejected = counts(predicted(client, text, max_tokens=40))
    assert 0.8 * used <= accepted <= used and rejected <= 3
    assert counts(predicted(client, parts, max_tokens=40)) == (accepted, rejected)
    assert counts(predicted(client, text, max_tokens=40, **usage), stream=True) == (accepted, rejected)
    other = predicted(client, "0123456789" * 4, max_tokens=40)
    assert other.json()["choices"] == answer["choices"]
    assert counts(other)[1] > counts(other)[0]


def test_without_a_prediction_nothing_is_counted(client: httpx.Client) -> None:
    assert counts(chat(client)) == (0, 0)
    assert counts(predicted(client, "")) == (0, 0)
    assert counts(predicted(client, [])) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content[0].text"),
    ],
)
def test_a_malformed_prediction_is_refused(client: httpx.Client, prediction: Any, param: str) -> None:
    refused = error(client, prediction=prediction)

    assert (refused["param"], refused["code"]) == (param, "invalid_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"max_completion_tokens": 5},
        {"tools": [TOOL]},
    ],
)
def test_what_openai_refuses_beside_a_prediction(
    client: httpx.Client, reporting: httpx.Client, fields: dict[str, Any]
) -> None:
    prediction = {"type": "content", "content": "a"}
    refused = error(client, prediction=prediction, **fields)

    assert (refused["param"], refused["code"]) == ("prediction", "unsupported_parameter")
    assert next(iter(fields)) in refused["message"]
    body = {**CHAT, "prediction": prediction, **fields}
    served = reporting.post("/v1/chat/completions", json=body)
    assert served.headers["x-enginehouse-unsupported"].split(", ")[0] == "prediction"


def test_unknown_members_of_a_prediction_are_listed(client: httpx.Client) -> None:
    response = chat(client, prediction={"type": "content", "content": "a", "odd": 1})

    assert response.headers["x-enginehouse-ignored"] == "prediction.odd"


def test_only_chats_take_predictions(client: httpx.Client) -> None:
    body = {"prompt": "a", "prediction": {"type": "content", "content": "a"}}
    refused = client.post("/v1/completions", json=body).json()["error"]

    assert refused["param"] == "prediction" and "only chats" in refused["message"]
