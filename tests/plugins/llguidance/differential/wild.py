"""Schemas in the style of the tools and formats that people take them from, each with what is peculiar to it."""

from __future__ import annotations

from typing import Any

__all__ = ["WILD"]

TEXT: dict[str, Any] = {"type": "string"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
CLOSED = {"additionalProperties": False}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | ({"required": required.split()} if required else {})


WILD: dict[str, Any] = {
    # Generators of schemas
    "zod 4 record": {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": "boolean"}},
    "zod 4 record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": {"type": "number"},
        "required": ["a", "b"],
    },
    "zod 4 object": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_object(
            "id role",
            id={"type": "string", "format": "uuid", "pattern": "^[0-9a-fA-F-]{36}$"},
            role={"anyOf": [{"type": "string", "const": "admin"}, {"type": "string", "const": "user"}]},
            age={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            never={"not": {}},
        ),
        "additionalProperties": False,
    },
    "zod discriminated union": {
        "oneOf": [
            _object("type radius", type={"const": "circle"}, radius={"type": "number"}),
            _object("type side", type={"const": "square"}, side={"type": "number", "minimum": 0}),
        ]
    },
    "zod tuple": {"type": "array", "prefixItems": [TEXT, {"type": "number"}], "items": {"type": "boolean"}},
    "pydantic set": {
        "title": "S",
        "properties": {"tags": {**TEXTS, "uniqueItems": True, "title": "Tags"}},
        "type": "object",
    },
    "pydantic tagged": {
        "$defs": {
            "Cat": {**_object("kind", kind={"const": "cat", "title": "Kind"}, lives={"default": 9, "type": "integer"})},
            "Dog": {**_object("kind", kind={"enum": ["dog", "puppy"]}, name={"anyOf": [TEXT, {"type": "null"}]})},
        },
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    "pydantic literal enum set": {
        "properties": {
            "days": {"type": "array", "uniqueItems": True, "items": {"enum": ["mo", "tu", "we", "th", "fr"]}}
        },
        "required": ["days"],
        "type": "object",
    },
    "schemars": {
        "$schema": DRAFT_7,
        "title": "Config",
        **_object(
            "port mode",
            port={"type": "integer", "format": "uint16", "minimum": 0.0},
            mode={
                "oneOf": [{"description": "fast", "type": "string", "enum": ["Fast"]}, _object("Custom", Custom=TEXT)]
            },
            limit={"type": ["integer", "null"], "format": "uint64", "minimum": 0.0},
        ),
        "definitions": {},
    },
    "invopop": {"$ref": "#/$defs/C", "$defs": {"C": {**_object("a", a=TEXT, b=TEXTS), "additionalProperties": False}}},
    "njsonschema": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        **_object(at={"type": "string", "format": "date-time"}, n={"type": "integer", "format": "int32"}),
        "x-abstract": True,
        "definitions": {"E": {"enum": [0, 1], "x-enumNames": ["A", "B"]}},
    },
    "victools": {"$defs": {"A(1)": _object(x=TEXT)}, **_object(a={"$ref": "#/$defs/A(1)"}), "$comment": "generated"},
    "typebox": {
        **_object("a", a={"$id": "A", "type": "string"}, b={"type": "array", "items": {"$ref": "A"}}),
        "$id": "T",
    },
    "typescript-json-schema": {
        **_object(f={"typeof": "function"}, d={"type": "object", "additionalProperties": {"type": "number"}}),
        "propertyOrder": ["f", "d"],
    },
    "protobuf": _object(id={"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^-?(0|[1-9]\\d*)$"}]}),
    "class-validator": _object(
        "mail", mail={"type": "string", "format": "email"}, ip={"type": "string", "format": "ip"}
    ),
    # Tools of agents
    "mcp tool": {
        **_object(
            "path", path={**TEXT, "description": "File"}, lines={"type": "integer", "minimum": 1, "default": 100}
        ),
        "annotations": {"readOnlyHint": True},
    },
    "mcp edits": _object(
        "edits", edits={"type": "array", "minItems": 1, "items": _object("old new", old=TEXT, new=TEXT)}
    ),
    "function with optional groups": {
        **_object("", id=TEXT, name=TEXT, mail=TEXT),
        "oneOf": [{"required": ["id"]}, {"required": ["name", "mail"]}],
    },
    "function with exclusive options": {**_object("", a=TEXT, b=TEXT), "not": {"required": ["a", "b"]}},
    "openai strict": {
        **_object("steps answer", steps={"type": "array", "items": _object("text", text=TEXT)}, answer=TEXT),
        "additionalProperties": False,
        "strict": True,
    },
    # OpenAPI and Kubernetes
    "openapi 3.0 pet": {
        **_object(
            "name photoUrls",
            id={"type": "integer", "format": "int64", "example": 10, "readOnly": True},
            name={**TEXT, "example": "doggie"},
            photoUrls={**TEXTS, "xml": {"wrapped": True}},
            status={**TEXT, "enum": ["available", "pending", "sold"], "nullable": True},
        ),
        "xml": {"name": "pet"},
        "externalDocs": {"url": "https://example.org"},
    },
    "openapi all of": {
        "components": {"schemas": {"Base": _object("id", id=TEXT), "More": _object("size", size={"type": "number"})}},
        "allOf": [{"$ref": "#/components/schemas/Base"}, {"$ref": "#/components/schemas/More"}],
    },
    "openapi 3.1 unevaluated": {
        "allOf": [_object("id", id=TEXT), _object("", size={"type": "number"})],
        "unevaluatedProperties": False,
    },
    "openapi bytes": _object(data={"type": "string", "format": "byte"}, file={"type": "string", "format": "binary"}),
    "openapi phone": _object(phone={"type": "string", "format": "phone", "maxLength": 20}),
    "kubernetes int or string": _object(
        port={"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    ),
    "kubernetes list": _object(
        ports={
            "type": "array",
            "items": _object("containerPort", containerPort={"type": "integer", "format": "int32"}, protocol=TEXT),
            "x-kubernetes-list-map-keys": ["containerPort", "protocol"],
            "x-kubernetes-list-type": "map",
        }
    ),
    "kubernetes crd": {
        **_object(
            "spec",
            apiVersion=TEXT,
            kind=TEXT,
            metadata={"type": "object"},
            spec=_object("replicas", replicas={"type": "integer"}),
        ),
        "x-kubernetes-group-version-kind": [{"group": "g", "kind": "K", "version": "v1"}],
        "x-kubernetes-preserve-unknown-fields": True,
    },
    "kubernetes validation": _object(
        "q",
        q={"type": "string", "pattern": "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$", "x-kubernetes-validations": []},
    ),
    # Files of projects
    "package.json": {
        "$schema": DRAFT_7,
        **_object(
            "name version",
            name={
                "type": "string",
                "maxLength": 214,
                "minLength": 1,
                "pattern": "^(?:(?:@(?:[a-z0-9-*~][a-z0-9-*._~]*)?/[a-z0-9-._~])|[a-z0-9-~])[a-z0-9-._~]*$",
            },
            version=TEXT,
            keywords=TEXTS,
            private={"type": ["boolean", "string"], "enum": [False, True, "false", "true"]},
            engines={"type": "object", "additionalProperties": TEXT},
            author={"$ref": "#/definitions/person"},
            bundledDependencies={"oneOf": [TEXTS, {"type": "boolean"}]},
            exports={
                "oneOf": [{"type": "string", "pattern": "^\\./"}, {"type": "object", "additionalProperties": TEXT}]
            },
        ),
        "definitions": {
            "person": {
                "type": ["object", "string"],
                "required": ["name"],
                "properties": {"name": TEXT, "url": {"type": "string", "format": "uri"}},
            }
        },
        "patternProperties": {"^_": {"description": "private"}},
    },
    "tsconfig": _object(
        compilerOptions=_object(
            target={
                "anyOf": [
                    {"enum": ["ES5", "ES2015", "ESNext"]},
                    {"pattern": "^([Ee][Ss]([356]|(20(1[567]|2[01]))|[Nn]ext))$"},
                ],
                "type": "string",
            },
            lib={"type": "array", "uniqueItems": True, "items": {"type": "string", "enum": ["DOM", "ES5", "ES6"]}},
            strict={"type": "boolean", "markdownDescription": "Strict"},
        ),
        files={"type": "array", "uniqueItems": True, "items": TEXT},
    ),
    "github workflow": {
        "$schema": DRAFT_7,
        **_object(
            "on jobs",
            on={
                "oneOf": [
                    {"$ref": "#/definitions/event"},
                    {"type": "array", "items": {"$ref": "#/definitions/event"}, "minItems": 1},
                    {
                        "type": "object",
                        "properties": {"push": {"$ref": "#/definitions/ref"}},
                        "additionalProperties": False,
                    },
                ]
            },
            jobs={
                "type": "object",
                "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": {"$ref": "#/definitions/job"}},
                "minProperties": 1,
                "additionalProperties": False,
            },
        ),
        "definitions": {
            "event": {"type": "string", "enum": ["push", "pull_request", "schedule"]},
            "ref": {
                "type": ["object", "null"],
                "properties": {
                    "branches": {"type": "array", "items": TEXT},
                    "branches-ignore": {"type": "array", "items": TEXT},
                },
            },
            "step": {
                **_object("", name=TEXT, uses=TEXT, run=TEXT, shell={"anyOf": [TEXT, {"enum": ["bash", "sh"]}]}),
                "oneOf": [{"required": ["uses"]}, {"required": ["run"]}],
                "dependencies": {"shell": ["run"]},
            },
            "job": {
                **_object(
                    "runs-on",
                    **{
                        "runs-on": TEXT,
                        "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}, "minItems": 1},
                        "timeout-minutes": {"type": "number"},
                    },
                )
            },
        },
    },
    "dependabot": _object(
        "version updates",
        version={"type": "integer", "enum": [2]},
        updates={
            "type": "array",
            "items": {
                **_object("package-ecosystem", **{"package-ecosystem": TEXT, "directory": TEXT, "directories": TEXTS}),
                "oneOf": [{"required": ["directory"]}, {"required": ["directories"]}],
            },
        },
    ),
    "docker compose": {
        **_object(
            version=TEXT,
            services={
                "type": "object",
                "patternProperties": {"^[a-zA-Z0-9._-]+$": {"$ref": "#/definitions/service"}},
                "additionalProperties": False,
            },
        ),
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "definitions": {
            "list": {"type": "array", "items": TEXT, "uniqueItems": True},
            "service": _object(
                image=TEXT,
                ports={
                    "type": "array",
                    "items": {"oneOf": [{"type": "number", "format": "ports"}, {"type": "string", "format": "ports"}]},
                    "uniqueItems": True,
                },
                environment={
                    "oneOf": [
                        {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
                        {"$ref": "#/definitions/list"},
                    ]
                },
            ),
        },
    },
    "eslint": _object(
        root={"type": "boolean"},
        rules={
            "type": "object",
            "additionalProperties": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 2},
                    {"enum": ["off", "warn", "error"]},
                    {"type": "array", "minItems": 1},
                ]
            },
        },
    ),
    "renovate": _object(
        schedule={"type": ["string", "array"], "items": TEXT},
        packageRules={"type": "array", "items": _object(matchPackageNames=TEXTS, enabled={"type": "boolean"})},
    ),
    "pre-commit": _object(
        "repos",
        repos={
            "type": "array",
            "items": {
                **_object("repo hooks", repo=TEXT, rev=TEXT, hooks={"type": "array"}),
                "if": {"properties": {"repo": {"const": "local"}}},
                "then": {},
                "else": {"required": ["rev"]},
            },
        },
    ),
    "pyproject ruff": {
        **_object(
            **{
                "line-length": {"type": ["integer", "null"], "format": "uint16", "maximum": 320, "minimum": 1},
                "select": {"type": ["array", "null"], "items": {"$ref": "#/definitions/R"}},
            }
        ),
        "definitions": {"R": {"type": "string", "enum": ["E", "F", "I"]}},
        "x-taplo": {"links": {}},
    },
    "vs code task": _object(
        "label",
        label=TEXT,
        type={"enum": ["shell", "process"], "_format": "choice"},
        options={"type": "object", "additionalProperties": True, "markdownEnumDescriptions": ["a"]},
    ),
    "helm values": {
        "$schema": DRAFT_7,
        **_object(
            "image",
            image=_object(
                "repository", repository=TEXT, pullPolicy={"type": "string", "pattern": "^(Always|Never|IfNotPresent)$"}
            ),
            replicaCount={"type": "integer", "minimum": 0},
        ),
    },
    "ansible": {
        "items": {
            "anyOf": [
                _object("hosts", hosts=TEXT, tasks={"type": "array"}),
                _object("import_playbook", import_playbook=TEXT),
            ]
        },
        "type": "array",
        "$id": "https://example.org/playbook.json",
    },
    "terraform": _object(
        "resource",
        resource={
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "object"}},
        },
    ),
    "openapi document": {
        "$id": "https://example.org/oas",
        "$dynamicAnchor": "meta",
        **_object(
            "openapi", openapi={"type": "string", "pattern": "^3\\.1\\.\\d+(-.+)?$"}, info={"$ref": "#/$defs/info"}
        ),
        "$defs": {"info": {"$comment": "info", **_object("title", title=TEXT), "unevaluatedProperties": False}},
    },
    "lists by dynamic reference": {
        "$id": "https://example.org/lists",
        "if": {"properties": {"kind": {"const": "numbers"}}, "required": ["kind"]},
        "then": {"$ref": "numbers"},
        "else": {"$ref": "texts"},
        "type": "object",
        "$defs": {
            "list": {
                "$id": "list",
                "properties": {"list": {"type": "array", "minItems": 1, "items": {"$dynamicRef": "#item"}}},
                "required": ["list"],
                "$defs": {"any": {"$dynamicAnchor": "item"}},
            },
            **{
                name: {"$id": name, "$ref": "list", "$defs": {"item": {"$dynamicAnchor": "item", "type": kind}}}
                for name, kind in (("numbers", "number"), ("texts", "string"))
            },
        },
    },
    "tree by dynamic reference": {
        "$id": "https://example.org/strict",
        "$dynamicAnchor": "node",
        "$ref": "tree",
        "unevaluatedProperties": False,
        "$defs": {
            "tree": {
                "$id": "tree",
                "$dynamicAnchor": "node",
                **_object(
                    "data", data={"type": "integer"}, children={"type": "array", "items": {"$dynamicRef": "#node"}}
                ),
            },
            "other": {"$id": "other", "$dynamicAnchor": "leaf"},
            "another": {"$id": "another", "$dynamicAnchor": "leaf", "$dynamicRef": "#leaf"},
        },
    },
    "listed names that are not evaluated": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "propertyNames": {"enum": ["b", "c"]},
        "unevaluatedProperties": {"type": "null"},
    },
    "at most two of three": {
        **_object("b", a={"type": "null"}, b={"type": "boolean"}, c={"const": 1}),
        "maxProperties": 2,
    },
    "members that never are": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/never"}, "b": {"type": "array", "items": {"$ref": "#/$defs/never"}}},
        "$defs": {"never": False},
    },
    "not without unevaluated members": {
        "type": "object",
        "not": {"anyOf": [True, {"properties": {"a": True}}], "unevaluatedProperties": False},
    },
    # Formats of data
    "geojson point": {
        "$id": "https://example.org/Point.json",
        "title": "Point",
        **_object(
            "type coordinates",
            type={"type": "string", "enum": ["Point"]},
            coordinates={"type": "array", "minItems": 2, "items": {"type": "number"}},
            bbox={"type": "array", "minItems": 4, "items": {"type": "number"}},
        ),
    },
    "geojson geometry": {
        "oneOf": [
            _object(
                "type coordinates",
                type={"enum": [kind]},
                coordinates={"type": "array", "items": {"type": "number"}, "minItems": 2},
            )
            for kind in ("Point", "LineString", "Polygon")
        ]
    },
    "json feed": _object(
        "version items",
        version={"type": "string", "format": "uri"},
        items={
            "type": "array",
            "items": {
                **_object("id", id=TEXT, content_html=TEXT, content_text=TEXT),
                "anyOf": [{"required": ["content_html"]}, {"required": ["content_text"]}],
            },
        },
    ),
    "cloud event": {
        **_object(
            "id source specversion type",
            id={**TEXT, "minLength": 1},
            source={"type": "string", "format": "uri-reference", "minLength": 1},
            specversion=TEXT,
            type=TEXT,
            time={"type": ["string", "null"], "format": "date-time"},
        ),
        "additionalProperties": True,
    },
    "vega": _object(
        "mark",
        mark={"anyOf": [{"enum": ["bar", "line"]}, _object("type", type=TEXT)]},
        width={"anyOf": [{"type": "number"}, {"const": "container"}]},
    ),
    "json patch": {
        "type": "array",
        "items": {
            "oneOf": [
                {
                    "additionalProperties": False,
                    "required": ["value", "op", "path"],
                    "properties": {"path": TEXT, "op": {"enum": ["add", "test"]}, "value": {}},
                },
                {
                    "additionalProperties": False,
                    "required": ["op", "path"],
                    "properties": {"path": TEXT, "op": {"enum": ["remove"]}},
                },
            ]
        },
    },
    "invoice": _object(
        "number lines total",
        number={"type": "string", "pattern": "^INV-\\d{6}$"},
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 50,
            "items": _object(
                "amount", amount={"type": "number", "minimum": 0}, vat={"type": "number", "enum": [0, 0.07, 0.19]}
            ),
        },
        total={"type": "number", "minimum": 0},
    ),
    "address by country": {
        **_object("country", country={"enum": ["US", "CA"]}, postal=TEXT),
        "allOf": [
            {
                "if": {"properties": {"country": {"const": "US"}}},
                "then": {"properties": {"postal": {"pattern": "^[0-9]{5}$"}}},
            },
            {
                "if": {"properties": {"country": {"const": "CA"}}},
                "then": {"properties": {"postal": {"pattern": "^[A-Z][0-9][A-Z]$"}}},
            },
        ],
    },
    "credit card": {
        **_object("name", name=TEXT, credit_card={"type": "number"}, billing=TEXT),
        "dependentRequired": {"credit_card": ["billing"]},
    },
    "dependent schema": {
        **_object("name", name=TEXT, card={"type": "integer"}),
        "dependentSchemas": {"card": {"properties": {"cvc": {"type": "integer"}}, "required": ["cvc"]}},
    },
    "list with a winner": {
        "type": "array",
        "items": {"enum": ["win", "lose"]},
        "contains": {"const": "win"},
        "maxContains": 1,
        "minItems": 1,
        "maxItems": 6,
    },
    "quiz": _object(
        "options answer",
        options={"type": "array", "items": {**TEXT, "minLength": 1}, "minItems": 4, "maxItems": 4, "uniqueItems": True},
        answer={"type": "integer", "minimum": 0, "maximum": 3},
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                "value", value={"type": "number"}, children={"type": "array", "items": {"$ref": "#/$defs/node"}}
            )
        },
    },
    "linked by anchor": {
        "$ref": "#node",
        "$defs": {
            "n": {"$anchor": "node", **_object("v", v=TEXT, next={"anyOf": [{"$ref": "#node"}, {"type": "null"}]})}
        },
    },
    "json schema in json": _object(
        "type",
        type={"enum": ["string", "object"]},
        properties={"type": "object", "additionalProperties": {"$ref": "#"}},
    ),
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://x/y#",
        **_object("a", a={"type": "integer", "minimum": 1}),
    },
    "draft 6 examples": {
        "$schema": "http://json-schema.org/draft-06/schema#",
        **_object(a={"type": "string", "examples": ["x"], "const": "x"}),
    },
    "draft 3 forms": {
        "properties": {"a": {"type": "string", "description": "d", "title": "t"}},
        "type": "object",
        "additionalProperties": {},
    },
    "defs under any key": {
        "$ref": "#/types/T",
        "types": {"T": _object("a", a={"$ref": "#/types/U"}), "U": {"type": "integer"}},
    },
    "sloppy": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLenght": 5, "readonly": True, "requried": True}},
        "additionalproperties": False,
    },
    "price in cents": _object("price", price={"type": "number", "multipleOf": 0.01, "minimum": 0}),
    "record of at least two": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "minProperties": 2,
        "maxProperties": 4,
    },
    "two kinds of names": {
        "type": "object",
        "patternProperties": {"^x-": {}, "^[a-w]": TEXT},
        "additionalProperties": False,
    },
    # Cloud resources
    "union of closed objects": {
        "oneOf": [
            {**_object(**{kind: {"type": "object", "properties": {"size": {"type": "integer"}}}}), **CLOSED}
            for kind in ("Ebs", "FsxLustre", "FsxOpenZfs")
        ]
    },
    "resource name": {
        **_object(
            "arn", arn={**TEXT, "pattern": "^arn:(aws[a-z-]*)?:[a-z0-9-.]+:[^:]*:\\d{12}:.+$", "maxLength": 2048}
        ),
        **CLOSED,
    },
    "tag keys": {"type": "object", "patternProperties": {"^(?!aws:)[\\w.:/=+@-]{1,128}$": TEXT}, **CLOSED},
    "host label": {**TEXT, "pattern": "^(?!-)[A-Za-z0-9-]{1,63}(?<!-)$"},
    "anchors in a group": {**TEXT, "pattern": "(^$|^s3://[a-z0-9.-]{3,63}(/.*)?$)"},
    "address": {**TEXT, "pattern": "^((25[0-5]|(2[0-4]|1\\d|[1-9]|)\\d)\\.?\\b){4}$"},
    # Forms
    "password": {**TEXT, "pattern": "^(?=.*[a-z])(?=.*[A-Z])(?=.*\\d)(?=.*[^\\w\\s]).{8,128}$"},
    "kinds of form items": {
        **_object("type", type={"enum": ["markdown", "input", "dropdown", "checkboxes"]}, label=TEXT, options=TEXTS),
        "allOf": [
            {"if": {"properties": {"type": {"const": kind}}}, "then": {"required": ["type", asked], **limits}}
            for kind, asked, limits in (
                ("input", "label", {"properties": {"options": False}}),
                ("dropdown", "options", {}),
                ("checkboxes", "options", {"properties": {"label": {"minLength": 1}}}),
                ("markdown", "label", {"maxProperties": 2}),
            )
        ],
    },
    "names by language": {
        **_object(default=TEXT, **{"x-note": {"type": "null"}}),
        "patternProperties": {"^[a-z]{2}$": TEXT, "^x-": True, "^[a-z]{2}-[A-Z]{2}$": TEXT},
        **CLOSED,
        "maxProperties": 3,
    },
    "large ids": {"enum": [1234567890123456789, 1234567890123456790, 42]},
    "many flags": {**_object(**{f"flag{number}": {"type": "boolean"} for number in range(1200)}), "minProperties": 1},
    "remote": {"$ref": "https://example.org/other.json"},
}
"""Name and schema. A reference to another document is meant to be refused."""
