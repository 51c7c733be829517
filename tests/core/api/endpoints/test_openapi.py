"""The OpenAPI document is true: what it shows is accepted, and what is answered is what it shows."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from enginehouse.api.http.app import build_app
from enginehouse.api.openapi.document import build_document
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script

from .conftest import DOCUMENT, LIMITS, PLUGINS, ROUTES, STATE, Endpoints, ModelSettings, serve

OPERATIONS = {
    path: item["post"]
    for path, item in DOCUMENT["paths"].items()
    if "post" in item and not path.startswith(("/admin/", "/v1/"))  # the last ones are orders, too
}
BODIES = {path: post["requestBody"]["content"]["application/json"] for path, post in OPERATIONS.items()}
# Which examples need a plugin that is an extra.
CONSTRAINED = ("An answer that matches a JSON Schema", "A tool that must be called", "One of several words")
RELATIVE = {("min_tokens", "maximum")}  # another field bounds it further
ANYTHING = {"annotations", "audio", "reasoning"}  # of messages: taken from earlier answers, and not read


def examples() -> Iterator[Any]:
    for path, content in BODIES.items():
        for title, example in content["examples"].items():
            marks = [pytest.mark.llguidance] if title in CONSTRAINED else []
            yield pytest.param(path, example["value"], id=f"{path}: {title}", marks=marks)


def validator(schema: dict[str, Any], *, is_strict: bool = True) -> Draft202012Validator:
    """Of one schema of the document; a strict one knows every member."""
    document = copy.deepcopy(DOCUMENT)
    if is_strict:
        for answer in document["components"]["schemas"].values():
            tighten(answer)
    return Draft202012Validator({**copy.deepcopy(schema), "components": document["components"]})


def tighten(schema: Any) -> None:
    if isinstance(schema, dict):
        for value in schema.values():
            tighten(value)
        if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
    elif isinstance(schema, list):
        for value in schema:
            tighten(value)


def component(name: str) -> Draft202012Validator:
    return validator({"$ref": f"#/components/schemas/{name}"})


def answer_of(path: str, kind: str = "application/json") -> dict[str, Any]:
    return OPERATIONS[path]["responses"]["200"]["content"][kind]


# -- the document by itself -------------------------------------------------------------------------


def test_document_is_served_offline(fake: Endpoints) -> None:
    for path in ("/schema", "/schema/openapi.json"):
        response = fake.client.get(path)

        assert response.headers["content-type"] == "application/json"
        assert response.json()["openapi"] == "3.1.0"
        assert "http://" not in response.text and "https://" not in response.text


def test_document_lists_every_address() -> None:
    root = {path for path, item in DOCUMENT["paths"].items() if "servers" in item}
    listed = {f"{prefix}{path}" for path in DOCUMENT["paths"] if path not in root for prefix in ("/v1", "")}

    # One route takes all orders, as ids may hold slashes.
    orders = r"(/admin/models/{model_id})/(load|unload|download|cancel-download|adapters(/{adapter})?)"
    root = {re.sub(orders, r"\1", path) for path in root}
    assert listed | root | {"/schema/openapi.json"} == {route.path_format for route in build_app(STATE).app.routes}


def test_schemas_are_schemas_and_references_lead_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (value["$ref"],) if isinstance(value.get("$ref"), str) else ()
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in references(DOCUMENT):
        _, components, kind, name = reference.split("/")
        assert name in DOCUMENT[components][kind], reference


def test_every_member_of_a_request_says_what_it_is() -> None:
    """What the classes leave open is written down."""
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for member, value in schema.get("properties", {}).items():
            kinds = {"type", "anyOf", "oneOf", "enum", "const", "$ref"}
            assert kinds & value.keys() or member in ANYTHING, f"{name}.{member}"


def test_every_member_of_a_body_is_described() -> None:
    for content in BODIES.values():
        name = content["schema"]["$ref"].rpartition("/")[2]
        members = DOCUMENT["components"]["schemas"][name]["properties"]

        assert [member for member, schema in members.items() if not schema.get("description")] == [], name


def test_these_tests_notice_members_that_are_not_shown() -> None:
    error = {"message": "x", "type": "x", "param": None, "code": "x"}

    assert component("Error").is_valid({"error": error})
    assert not component("Error").is_valid({"error": {**error, "status": 400}})
    assert not component("Error").is_valid({"error": {"message": "x"}})


def test_operation_ids_are_unique() -> None:
    operations = [
        operation
        for item in DOCUMENT["paths"].values()
        for method, operation in item.items()
        if method in ("get", "post")
    ]

    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_limits_of_the_server_are_shown() -> None:
    document = build_document(ROUTES, {}, LimitsSettings(max_choices=3, max_tokens=77, max_messages=5, max_stop=2))
    members = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]

    assert members["n"]["maximum"] == 3
    assert members["max_tokens"]["maximum"] == members["max_completion_tokens"]["maximum"] == 77
    assert members["messages"]["maxItems"] == 5


def test_plugins_fields_are_shown() -> None:
    settings = Settings(plugins=PluginsSettings(allow=("samplers",)))
    document = build_document(ROUTES, PluginRegistry.for_settings(settings).request_fields, LIMITS)

    for request in ("ChatCompletionRequest", "CompletionRequest"):
        declared = document["components"]["schemas"][request]["properties"]["xtc_probability"]
        assert (declared["minimum"], declared["maximum"], declared["x-plugin"]) == (0, 1, "xtc")


# -- requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), list(examples()))
def test_example_is_answered_as_shown(fake: Endpoints, path: str, body: dict[str, Any]) -> None:
    validator(BODIES[path]["schema"]).validate(body)
    if not body.get("stream"):
        validator(answer_of(path)["schema"]).validate(fake.answer(f"/v1{path}", **body))
        return
    events = fake.stream(f"/v1{path}", **body)
    chunk = validator(answer_of(path, "text/event-stream")["x-event-schema"])
    for event in events[:-1]:
        chunk.validate(json.loads(event))
    assert events[-1] == "[DONE]"


def bounds() -> Iterator[Any]:
    """Each bounded number, with its bound and the direction that leads outside."""
    for path, name in (("/chat/completions", "ChatCompletionRequest"), ("/completions", "CompletionRequest")):
        for member, schema in DOCUMENT["components"]["schemas"][name]["properties"].items():
            for keyword, step in (("minimum", -1), ("maximum", 1)):
                if keyword in schema and (member, keyword) not in RELATIVE:
                    yield pytest.param(path, member, schema[keyword], step, id=f"{name}.{member} {keyword}")


@pytest.mark.parametrize(("path", "member", "bound", "step"), list(bounds()))
def test_bounds_are_those_of_the_server(fake: Endpoints, path: str, member: str, bound: float, step: int) -> None:
    """The value at the bound is taken, the next one outside is refused by name."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "max_completion_tokens": 1}
    body = chat if path == "/chat/completions" else {"prompt": "Hi", "echo": True, "max_tokens": 1}
    if member == "max_tokens":
        body.pop("max_completion_tokens", None)

    assert fake.refusal(f"/v1{path}", **{**body, member: bound + step})["param"] == member
    fake.answer(f"/v1{path}", **{**body, member: bound})


# -- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"loglikelihood": True, "prompt_logprobs": 2},
        {"logprobs": 1, "n": 2},
        {"temperature": 0.5, "seed": 1, "colour": "red", "stop": ["x"]},
    ],
    ids=["scores", "logprobs", "parameters"],
)
def test_answers_are_as_shown(fake: Endpoints, path: str, fields: dict[str, Any], stream: bool) -> None:
    """Everything that only comes when it is asked for: scores of the prompt, details, token counts in streams."""
    if path == "/chat/completions" and "logprobs" in fields:
        fields = {**fields, "logprobs": True, "top_logprobs": 1}
    body = {"prompt": "Once upon a time", "max_tokens": 4, **fields}
    headers = {"x-enginehouse-details": "true"}
    if not stream:
        answer = fake.client.post(f"/v1{path}", json=body, headers=headers).json()
        assert "enginehouse" in answer
        validator(answer_of(path)["schema"]).validate(answer)
        return
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = fake.client.post(f"/v1{path}", json=body, headers=headers)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events[:-1]]
    assert any("enginehouse" in chunk for chunk in chunks) and any(chunk["usage"] for chunk in chunks)
    for chunk in chunks:
        validator(answer_of(path, "text/event-stream")["x-event-schema"]).validate(chunk)


def test_models_and_health_are_as_shown(fake: Endpoints) -> None:
    component("ModelList").validate(fake.client.get("/v1/models").json())
    component("Model").validate(fake.client.get("/v1/models/fake").json())
    component("Health").validate(fake.client.get("/health").json())


def test_admin_addresses_answer_as_shown(fake: Endpoints) -> None:
    component("ServedModelList").validate(fake.client.get("/admin/models").json())
    component("ServedModel").validate(fake.client.get("/admin/models/fake").json())
    with fake.client.stream("GET", "/admin/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": ping"
        for order in ("unload", "load"):
            component("ServedModel").validate(fake.answer(f"/admin/models/fake/{order}"))
        events = [json.loads(next(line for line in lines if line).removeprefix("data: ")) for _ in range(3)]
    for event in events:
        component("ModelEvent").validate(event)
    refused = fake.post("/admin/models/fake/unload", drain=0)
    assert refused.status_code == 400
    component("Error").validate(refused.json())


def test_errors_are_as_shown(fake: Endpoints) -> None:
    responses = [
        fake.post("/v1/chat/completions"),
        fake.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], model="nobody"),
        fake.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
        fake.client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}),
        fake.client.get("/v1/nowhere"),
        fake.client.get("/v1/completions"),
        fake.client.get("/health", headers={"host": "example.org"}),
    ]

    assert [response.status_code for response in responses] == [400, 404, 400, 415, 404, 405, 403]
    for response in responses:
        component("Error").validate(response.json())


def test_error_in_a_stream_is_as_shown(tmp_path) -> None:
    source = write_script(tmp_path / "broken.json", ["Hel", {"error": "boom"}])
    models = {"broken": ModelSettings(source=source, backend="scripted")}
    for server in serve(Settings(models=models, plugins=PluginsSettings(allow=()))):
        events = server.stream("/v1/completions", prompt="Hi")

        assert "error" in json.loads(events[-1])
        chunk = validator(answer_of("/completions", "text/event-stream")["x-event-schema"])
        for event in events:
            chunk.validate(json.loads(event))


def test_plugins_of_these_tests_are_those_of_the_server(fake: Endpoints) -> None:
    """The served document has the plugins' fields, too."""
    settings = Settings(plugins=PluginsSettings(allow=PLUGINS))
    document = build_document(ROUTES, PluginRegistry.for_settings(settings).request_fields, LIMITS)

    assert fake.client.get("/schema").json() == json.loads(json.dumps(document))
