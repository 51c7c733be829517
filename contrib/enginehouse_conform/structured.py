"""H18 and H19: answers that must be JSON."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, CheckFailed, require
from enginehouse_conform.reading import answered, content_of, offered, read_stream, refused

__all__ = ["CHECKS"]

_PET: dict[str, Any] = {
    "$defs": {"legs": {"enum": [0, 2, 4, "many", None]}, "name": {"type": "string", "minLength": 1, "maxLength": 12}},
    "type": "object",
    "properties": {
        "kind": {"const": "pet"},
        "name": {"$ref": "#/$defs/name"},
        "legs": {"$ref": "#/$defs/legs"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "größe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["kind", "name", "legs", "tags", "größe"],
    "additionalProperties": False,
}


def _schema(schema: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "t", "strict": strict, "schema": schema}}


def _parse(data: dict[str, Any], beginnings: tuple[str, ...]) -> Any:
    """Return the JSON of an answer; None if it was cut off, but its beginning must match."""
    content = content_of(data)
    if data["choices"][0]["finish_reason"] == "length":
        _check_beginning(content, beginnings)
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise CheckFailed(f"the answer is not valid JSON: {content[:160]!r}") from error


def _check_beginning(content: str, beginnings: tuple[str, ...]) -> None:
    text = content.lstrip()
    require(not text or text.startswith(beginnings), f"an answer that was cut begins with {text[:80]!r}")


def _check_pet(value: Any) -> None:
    if value is None:
        return
    fits = (
        isinstance(value, dict)
        and set(value) == set(_PET["required"])
        and value["kind"] == "pet"
        and isinstance(value["name"], str)
        and 1 <= len(value["name"]) <= 12
        and value["legs"] in (0, 2, 4, "many", None)
        and isinstance(value["tags"], list)
        and 1 <= len(value["tags"]) <= 2
        and all(isinstance(tag, bool) for tag in value["tags"])
        and (value["größe"] is None or isinstance(value["größe"], bool))
    )
    require(fits, f"the answer does not fit its schema: {json.dumps(value, ensure_ascii=False)[:200]}")


def _json_object(target: Target) -> None:
    for seed in (1, 2):
        fields = {"response_format": {"type": "json_object"}, "max_tokens": 120, "temperature": 1.2, "seed": seed}
        value = _parse(offered(target.chat(**fields), "json_object"), ("{",))
        require(value is None or isinstance(value, dict), f"json_object gave {json.dumps(value)[:80]}")


def _json_schema(target: Target) -> None:
    fields = {"response_format": _schema(_PET), "max_tokens": 160, "temperature": 1.2}
    for seed in (1, 2, 3):
        _check_pet(_parse(offered(target.chat(**fields, seed=seed), "a JSON schema with definitions"), ("{",)))
    stream = read_stream(target.chat(**fields, seed=4, stream=True))
    _check_beginning(stream.text(), ("{",))
    if stream.reasons() == ["stop"]:
        _check_pet(json.loads(stream.text()))


def _fail_closed(target: Target) -> None:
    offered(target.chat(response_format=_schema({"type": "boolean"})), "a JSON schema")
    cases: tuple[tuple[str, Any], ...] = (
        ("json_schema without a schema", {"type": "json_schema"}),
        ("the type 'yaml'", {"type": "yaml"}),
        ("a schema of the type 'strnig'", _schema({"type": "strnig"})),
        ("a schema of the type 7", _schema({"type": 7})),
        ("a pattern with an open brace", _schema({"type": "string", "pattern": "^(a$"})),
        ("a reference that leads nowhere", _schema({"$ref": "#/$defs/nothing"})),
    )
    for what, response_format in cases:
        refused(target.chat(response_format=response_format), what)
    refused(target.chat(response_format=_schema({"type": "strnig"}), stream=True), "a wrong schema, streamed")
    answered(target.chat(max_tokens=2), "a plain request afterwards")


def _not_enforced(target: Target) -> None:
    schema = {"type": "integer", "not": {"minimum": 5}, "minimum": 0, "maximum": 9}
    for strict in (True, False):
        answer = target.chat(response_format=_schema(schema, strict), max_tokens=20, temperature=1.2)
        if answer.status != 200:
            refused(answer, "a schema with 'not'")
            continue
        value = _parse(answered(answer), tuple("01234"))
        require(
            value is None or value in range(5), f"a schema with 'not' (strict: {strict}) was accepted, and gave {value}"
        )


CHECKS = (
    Check("H18", "json_object gives an object at any temperature.", _json_object),
    Check("H18", "A JSON schema with definitions, enums, constants and bounds holds, streamed or not.", _json_schema),
    Check("H19", "A response_format that makes no sense is refused; nothing is answered without it.", _fail_closed),
    Check("H19", "A keyword that cannot be enforced is refused, or the answer fits all the same.", _not_enforced),
)
