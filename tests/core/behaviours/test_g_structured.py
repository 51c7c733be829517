"""Group G: structured output. Every finished answer has the form that was asked for; what cannot be had is refused."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from .client import Server, check_client_error, forced, json_schema
from .conftest import FORCED

pytestmark = pytest.mark.llguidance

SEEDS = range(10)
SCHEMAS: dict[str, Any] = {
    "two definitions": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/small"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "small": {"type": "integer", "minimum": -5, "maximum": 5},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]},
    "enum of mixed types": {"enum": ["red", 1, None, True, 1.5, ["a"], {"b": 2}]},
    "const object": {"const": {"a": 1, "b": [True, None], 'quo"te': "é"}},
    "required, closed": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested arrays": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "nullable": {"type": ["string", "null"], "maxLength": 6},
    "odd names": {
        "type": "object",
        "properties": {'quo"te': {"type": "null"}, "日本": {"const": "語"}, "back\\slash/": {"type": "boolean"}},
        "required": ['quo"te', "日本", "back\\slash/"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def server(model_server: Server) -> Server:
    """Structured output needs a model that computes; a scripted one follows no constraint."""
    return model_server


def check_finished(schema: Any, text: str, finish_reason: str | None) -> bool:
    """A finished answer validates; whether it finished."""
    if finish_reason == "stop":
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    return finish_reason == "stop"


@pytest.mark.parametrize("name", SCHEMAS)
def test_h18_json_schema(server: Server, name: str) -> None:
    schema, finished = SCHEMAS[name], 0
    for seed in SEEDS:
        fields = {"temperature": 1.2, "seed": seed, "max_tokens": 200, "response_format": json_schema(schema)}
        if seed % 2:
            stream = server.stream_chat(n=2, **fields)
            answers = [(stream.text(index), stream.finish_reason(index)) for index in (0, 1)]
        else:
            fields["response_format"]["json_schema"]["strict"] = True
            choices = server.chat(n=2, **fields)["choices"]
            answers = [(choice["message"]["content"], choice["finish_reason"]) for choice in choices]
        finished += sum(check_finished(schema, *answer) for answer in answers)

    assert finished == 2 * len(SEEDS)  # nothing in these schemas can go on for long


@pytest.mark.parametrize("stream", [False, True])
def test_h18_json_object(server: Server, stream: bool) -> None:
    def answer(seed: int) -> tuple[str, str | None]:
        fields = {"temperature": 1.2, "seed": seed, "max_tokens": 60, "response_format": {"type": "json_object"}}
        if stream:
            streamed = server.stream_chat(**fields)
            return streamed.text(), streamed.finish_reason()
        choice = server.chat(**fields)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    with ThreadPoolExecutor(5) as pool:
        for text, reason in pool.map(answer, SEEDS):
            assert text.startswith("{")
            check_finished({"type": "object"}, text, reason)


def test_h18_json_object_with_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
    answer = server.chat(response_format={"type": "json_object", "schema": schema}, max_tokens=60)

    assert answer["choices"][0]["message"]["content"] == '{"ok": true}'
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_h18_on_the_completions_endpoint(server: Server) -> None:
    answer = server.complete(response_format=json_schema({"enum": ["a", "b"]}), max_tokens=20, n=2, temperature=1)

    assert all(choice["text"] in ('"a"', '"b"') for choice in answer["choices"])


def test_h18_null_is_a_value_inside_a_schema(server: Server) -> None:
    answer = server.chat(response_format=json_schema({"const": None}), max_tokens=20)

    assert answer["choices"][0]["message"]["content"] == "null"


@pytest.mark.parametrize("schema", [True, {}])
def test_h18_a_schema_that_is_no_object_or_empty_gives_json(server: Server, schema: Any) -> None:
    for seed in range(5):
        choice = server.chat(response_format=json_schema(schema), max_tokens=60, temperature=1.2, seed=seed)["choices"][
            0
        ]
        check_finished(schema, choice["message"]["content"], choice["finish_reason"])


REFUSED = {
    "no schema": ({"type": "json_schema"}, "json_schema"),
    "schema is null": (json_schema(None), "schema"),
    "unknown type": ({"type": "yaml"}, "type"),
    "no type": ({}, "type"),
    "no object": ("json", "object"),
    "schema is a list": (json_schema([]), "schema"),
    "schema is a number": (json_schema(3), "schema"),
    "misspelt type": (json_schema({"type": "strnig"}), "strnig"),
    "type is a number": (json_schema({"type": 7}), "/type"),
    "bad pattern": (json_schema({"type": "string", "pattern": "^a{2,1}"}), "/pattern"),
    "another bad pattern": (json_schema({"properties": {"a": {"pattern": "^*x$"}}}), "/properties/a/pattern"),
    "oneOf of equal schemas": (json_schema({"oneOf": [{}] * 13}), "no value was found"),
    "back-reference": (json_schema({"pattern": "(a)\\2"}), "there is no group 2"),
    "missing definition": (json_schema({"$ref": "#/$defs/none"}), "#/$defs/none"),
    "remote reference": (json_schema({"$ref": "http://localhost:1/x"}), "nothing is fetched"),
    "no value": (json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
    "strict is no boolean": (json_schema({}, strict="yes"), "strict"),
    "name is no string": (json_schema({}, name=3), "name"),
    "deep": (json_schema({"$defs": {}, "items": json.loads("[" * 40 + "]" * 40)}), "schema"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_h19_fail_closed(server: Server, case: str, stream: bool) -> None:
    response_format, named = REFUSED[case]
    error = check_client_error(server.try_chat(response_format=response_format, stream=stream), "response_format")

    assert named in error["message"]


def test_h19_references_to_other_places_are_never_followed(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for schema in ({"$ref": address}, {"$schema": address, "items": {"$ref": f"{address}#/a"}}, {"$id": address}):
            server.try_chat(response_format=json_schema(schema), max_tokens=1)
        listener.settimeout(0.3)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_h19_very_deep_and_very_large_schemas(server: Server) -> None:
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    body = server.chat_body()
    raw = json.dumps({**body, "response_format": json_schema("@")}).replace('"@"', deep)
    headers = {"content-type": "application/json"}
    check_client_error(server.client.post("/v1/chat/completions", content=raw, headers=headers))
    large = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
    check_client_error(server.try_chat(response_format=json_schema(large)), "response_format")
    server.check_alive()


def test_h19_many_refusals_do_no_harm(server: Server) -> None:
    bad = [response_format for response_format, _ in REFUSED.values()]
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda format: server.try_chat(response_format=format).status_code, bad * 3))

    assert set(statuses) == {400}
    server.check_alive()


ADDRESS = r"(\d{1,3}\.){3}\d{1,3}"


@pytest.mark.parametrize("field", ["structured_outputs", "guided_regex"])
def test_h20_regex(server: Server, field: str) -> None:
    value = {"regex": ADDRESS} if field == "structured_outputs" else ADDRESS
    for seed in range(5):
        answer = server.chat(**{field: value}, temperature=1.2, seed=seed, n=2, max_tokens=40)
        for choice in answer["choices"]:
            assert re.fullmatch(ADDRESS, choice["message"]["content"])
            assert choice["finish_reason"] == "stop"


def test_h20_choice_whose_one_string_begins_another(server: Server) -> None:
    choices, seen = ["the", "the mountain", "stop"], set()
    for seed in range(12):
        fields = {"structured_outputs": {"choice": choices}, "temperature": 1.5, "seed": seed, "n": 2, "max_tokens": 20}
        stream = server.stream_chat(**fields)
        seen |= {stream.text(0), stream.text(1)}
    biased = server.chat(guided_choice=["a", "a" * 8], max_tokens=20)["choices"][0]["message"]["content"]

    assert seen <= set(choices)
    assert "the mountain" in seen
    assert biased in ("a", "a" * 8)


GBNF = 'root ::= "yes, " reason | "no"\nreason ::= [a-z]{3} ("." | "!")'
LARK = 'start: "yes, " REASON END | "no"\nREASON: /[a-z]{3}/\nEND: "." | "!"'


@pytest.mark.parametrize("fields", [
    {"structured_outputs": {"grammar": GBNF}}, {"grammar": GBNF}, {"structured_outputs": {"grammar": LARK}},
    {"guided_grammar": LARK},
])  # fmt: skip
def test_h20_grammar(server: Server, fields: dict[str, Any]) -> None:
    for seed in range(5):
        choice = server.chat(**fields, temperature=1.2, seed=seed, max_tokens=30)["choices"][0]
        assert re.fullmatch(r"yes, [a-z]{3}[.!]|no", choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


def test_h20_json_under_its_other_names(server: Server) -> None:
    schema = {"const": {"a": None}}
    for fields in ({"structured_outputs": {"json": schema}}, {"structured_outputs": {"json": json.dumps(schema)}},
                   {"guided_json": schema}, {"json_schema": schema}):  # fmt: skip
        assert server.chat(**fields, max_tokens=20)["choices"][0]["message"]["content"] == '{"a": null}'
    answer = server.chat(structured_outputs={"json_object": True}, max_tokens=5)
    assert answer["choices"][0]["message"]["content"].startswith("{")


def test_h20_with_logprobs(server: Server) -> None:
    fields = {
        "structured_outputs": {"choice": ["Grüße", "stop"]},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 20,
    }
    whole, stream = server.chat(**fields, n=2), server.stream_chat(**fields)
    for choice in whole["choices"]:
        entries = choice["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
        assert all(len(entry["top_logprobs"]) >= 2 for entry in entries)
    assert bytes(byte for entry in stream.logprobs() for byte in entry["bytes"]).decode() == stream.text()


WRONG = [
    ("structured_outputs", {"regex": {"a": 1}}, "structured_outputs.regex"),
    ("structured_outputs", {"regex": ""}, "structured_outputs.regex"),
    ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": "a"}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a", 1]}, "structured_outputs.choice[1]"),
    ("structured_outputs", {"grammar": 3}, "structured_outputs.grammar"),
    ("structured_outputs", {"grammar": "root ::= ("}, "structured_outputs.grammar"),
    ("structured_outputs", {"grammar": "start: nothing"}, "structured_outputs.grammar"),
    ("structured_outputs", {"json": "{"}, "structured_outputs.json"),
    ("structured_outputs", {"json": {"not": {}}}, "structured_outputs.json"),
    ("structured_outputs", {"json_object": "yes"}, "structured_outputs.json_object"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    ("structured_outputs", [], "structured_outputs"),
    ("structured_outputs", {"structural_tag": {}, "whitespace_pattern": "x"}, "structured_outputs.whitespace_pattern"),
    ("guided_regex", 7, "guided_regex"),
    ("guided_regex", "(?=a)", "guided_regex"),
    ("guided_choice", ["a", None], "guided_choice[1]"),
    ("guided_grammar", {}, "guided_grammar"),
    ("guided_json", [], "guided_json"),
    ("grammar", 1, "grammar"),
    ("json_schema", {"type": "strnig"}, "json_schema"),
]


@pytest.mark.parametrize(("field", "value", "param"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_h20_wrong_values(server: Server, field: str, value: Any, param: str, stream: bool) -> None:
    error = check_client_error(server.try_chat(**{field: value}, stream=stream))

    assert error["param"] == param
    check_client_error(server.try_complete(**{field: value}, stream=stream), param)


def test_h20_two_at_once(server: Server) -> None:
    two = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    error = check_client_error(server.try_chat(**two), "guided_regex")

    assert "response_format" in error["message"]
    assert server.try_chat(response_format={"type": "text"}, guided_regex="a").status_code == 200


def test_h20_members_that_nobody_knows_are_listed(server: Server) -> None:
    format = {"type": "json_schema", "colour": 1, "json_schema": {"schema": {"const": 1}, "size": 2}}
    response = server.try_chat(response_format=format, max_tokens=5)

    assert response.status_code == 200
    ignored = response.headers["x-enginehouse-ignored"]
    assert ignored == "response_format.colour, response_format.json_schema.size"


# Behaviours of other groups, with text that the model is forced to say.


def test_h04_forced_characters_split_over_tokens(server: Server) -> None:
    assert (
        json.loads(server.chat(response_format=forced(FORCED), max_tokens=200)["choices"][0]["message"]["content"])
        == FORCED
    )
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda _: server.stream_chat(response_format=forced(FORCED), max_tokens=200), range(4)))
    assert [json.loads(stream.text()) for stream in streams] == [FORCED] * 4
    assert all("\ufffd" not in stream.body.decode() for stream in streams)


def test_h05_forced_line_breaks_stay_inside_data_lines(server: Server) -> None:
    text = "a\nb\r\nc\u2028d"
    assert json.loads(server.stream_chat(response_format=forced(text), max_tokens=60).text()) == text


@pytest.mark.parametrize("stop", [["green blu"], "green blu"])
def test_h06_stop_string_over_several_forced_tokens(server: Server, stop: Any) -> None:
    fields = {"response_format": forced("red green blue violet orange"), "stop": stop, "max_tokens": 60}
    answer, stream = server.chat(**fields), server.stream_chat(**fields)

    assert answer["choices"][0]["message"]["content"] == stream.text() == '"red '
    assert answer["choices"][0]["finish_reason"] == stream.finish_reason() == "stop"
    assert answer["usage"]["completion_tokens"] > 0
    assert server.complete(**fields)["choices"][0]["text"] == '"red '


@pytest.mark.parametrize(("stop", "text"), [("neering", '"mountai'), ("quip", '"mountaineering e'), ('"moun', "")])
def test_h07_stop_string_inside_a_forced_token(server: Server, stop: str, text: str) -> None:
    fields = {"response_format": forced("mountaineering equipment"), "stop": [stop], "max_tokens": 60}

    assert server.chat(**fields)["choices"][0]["message"]["content"] == server.stream_chat(**fields).text() == text


def test_h08_forced_text_ends_by_itself(server: Server) -> None:
    fields = {"response_format": forced("short"), "max_tokens": 50}

    assert server.chat(**fields)["choices"][0]["finish_reason"] == "stop"
    assert server.stream_chat(**fields).finish_reason() == "stop"


@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("bias", [100, -100])
def test_h10_a_bias_chooses_only_between_what_is_allowed(server: Server, temperature: float, bias: int) -> None:
    """Whatever is forced or banned: where nothing allowed is left, the form wins over the bias."""
    everything = {str(token_id): bias for token_id in range(250 if bias < 0 else 60)}
    fields = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 5, "temperature": temperature}

    assert server.chat(**fields, logit_bias=everything)["choices"][0]["message"]["content"] in ("yes", "no")
