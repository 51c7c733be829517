"""Schemas that people and generators write, and many that nobody should."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["schemas"]

NAMES = [
    "a",
    "b",
    "name",
    'q"uote',
    "sla/sh",
    "back\\slash",
    "é",
    "日本",
    "tab\t",
    "new\nline",
    "",
    "x y",
    "\x01",
    "$ref",
]
PATTERNS = [
    "^[a-z]+$", "a", "^a|b$", "^(x|y){2,3}$", "\\d+", "^\\w*$", "[^a-z]", ".", "^$", "", "^\\S+\\s\\S+$", "^[^\\W\\d]",
    "(^a$)|(^b+$)", "^.{2,4}$", "é+", "\\$", "[\\]\\\\-]", "^(?:ab)*?c", "\\u00e9", "^\\D\\W$",
    "^(?!a)", "(?<!b)$", "\\ba", "(^a|b$)c?", "^(?=.*a)(?!.*(?!b)c).{1,9}$", "^[ab]$", "(?=a)b",
    "^(a|b)\\1$", "^(?!.*(.)\\1)[ab]{0,4}$", "^(?>a+)b?$", "^(?:(a)|b)\\1?$", "([xy])\\1",
]  # fmt: skip
FORMATS = [
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "idn-email",
    "idn-hostname", "iri", "iri-reference", "uri-reference", "json-pointer", "int32", "uint64", "double", "password",
]  # fmt: skip

names = st.sampled_from(NAMES)
integers = st.one_of(
    st.integers(-20, 20), st.integers(), st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30])
)
numbers = st.one_of(
    integers,
    st.sampled_from(
        [0.0, -0.0, 0.1, 0.5, -0.5, 1.0, 1.5, 0.3, 99.99, 1e-7, 5e-324, 1e-40, 1e22, 1e300, 0.1 + 0.2, -1e-5]
    ),
    st.floats(-1000, 1000),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(names, st.text(max_size=5), st.sampled_from(["yes", "no", "\u2028", "\x7f", "😀", "a/b"]))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
constants = st.recursive(
    st.one_of(scalars, st.sampled_from([0.1 + 0.2, 2**53 + 1, 2**60 + 1])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=4,
)
counts = st.one_of(st.integers(0, 4), st.sampled_from([1.0, 2.0, 7, 100]))


@st.composite
def number_schemas(draw: Any) -> dict[str, Any]:
    schema = {"type": draw(st.sampled_from(["integer", "number", ["number", "null"], ["integer", "string"]]))}
    for key in draw(
        st.lists(st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), max_size=2)
    ):
        schema[key] = draw(numbers)
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(
            st.one_of(st.sampled_from([1, 2, 3, 7, 10, 0.5, 0.25, 1.5, 2.0, 0.1, 0.01]), numbers)
        )
    return schema


@st.composite
def string_schemas(draw: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    keys = draw(st.lists(st.sampled_from(["minLength", "maxLength", "pattern", "format"]), max_size=2, unique=True))
    values = {
        "minLength": counts,
        "maxLength": counts,
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
    }
    return schema | {key: draw(values[key]) for key in keys}


@st.composite
def array_schemas(draw: Any, inner: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    values = {
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=3),
        "minItems": counts,
        "maxItems": counts,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "minContains": counts,
        "maxContains": counts,
        "unevaluatedItems": st.one_of(st.booleans(), inner),
    }
    likely = [*values, "items", "items", "contains"]
    return schema | {key: draw(values[key]) for key in draw(st.lists(st.sampled_from(likely), max_size=4))}


@st.composite
def object_schemas(draw: Any, inner: Any) -> dict[str, Any]:
    schema: dict[str, Any] = draw(st.sampled_from([{"type": "object"}, {"type": "object"}, {}]))
    values = {
        "properties": st.dictionaries(names, inner, max_size=4),
        "required": st.lists(names, max_size=3),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, min_size=1, max_size=6),
        "propertyNames": st.one_of(string_schemas(), st.fixed_dictionaries({"enum": st.lists(names, min_size=1)})),
        "minProperties": counts,
        "maxProperties": counts,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2), max_size=1),
        "dependentSchemas": st.dictionaries(names, inner, max_size=1),
        "unevaluatedProperties": st.one_of(st.booleans(), inner),
    }
    likely = [*values, "properties", "properties", "properties", "required", "required", "additionalProperties"]
    keys = draw(st.lists(st.sampled_from(likely), min_size=1, max_size=5))
    return schema | {key: draw(values[key]) for key in keys}


@st.composite
def joined_schemas(draw: Any, inner: Any) -> dict[str, Any]:
    key = draw(st.sampled_from(["anyOf", "allOf", "oneOf", "anyOf", "not", "if"]))
    if key == "not":
        return {**draw(inner_object(inner)), key: draw(inner)}
    if key == "if":
        branches = draw(st.sampled_from([("then",), ("else",), ("then", "else")]))
        return {**draw(inner_object(inner)), key: draw(inner), **{name: draw(inner) for name in branches}}
    beside = draw(st.one_of(st.just({}), inner_object(inner)))
    return {**beside, key: draw(st.lists(inner, min_size=1, max_size=3))}


def inner_object(inner: Any) -> Any:
    return inner.filter(lambda schema: isinstance(schema, dict))


@st.composite
def referring_schemas(draw: Any, inner: Any) -> dict[str, Any]:
    reference = {"$ref": draw(st.sampled_from(["#/$defs/one", "#/$defs/t~1w~0o", "#", "#/$defs/none"]))}
    beside = draw(st.one_of(st.just({}), st.just({"description": "x"}), inner_object(inner)))
    return {**beside, **reference}


leaves = st.one_of(
    number_schemas(),
    string_schemas(),
    st.fixed_dictionaries({"enum": st.lists(constants, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"const": constants}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "string", "array"]), "enum": st.lists(constants, min_size=1)}
    ),
    st.sampled_from([True, False, {}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]),
)
bodies = st.recursive(
    leaves,
    lambda inner: st.one_of(
        array_schemas(inner),
        object_schemas(inner),
        object_schemas(inner),
        joined_schemas(inner),
        referring_schemas(inner),
    ),
    max_leaves=6,
)


@st.composite
def schemas(draw: Any) -> Any:
    """Whole schemas, with definitions where they refer to some."""
    schema = draw(bodies)
    if isinstance(schema, dict) and "$ref" in str(schema):
        schema = {**schema, "$defs": {"one": draw(bodies), "t/w~o": draw(bodies)}}
    return schema
