"""The fields that the bodies of both generating endpoints have, and the constraint on the output that they ask for.

Constraints are OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``, llama.cpp's ``grammar``
and ``json_schema``. At most one of them may be used. Only their form is checked here; the compiler decides if the
schema, expression or grammar can be enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

from enginehouse.api.generation.decoding import RequestBody
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import ConstraintFields, GenerationFields
from enginehouse.contract.refusals import refuse
from enginehouse.contract.shapes import ADAPTER_FIELDS, StreamOptions, find_ignored_in_lora, read_adapters
from enginehouse.contract.types import Constraint, ConstraintKind, GenerateRequest
from enginehouse.settings.config import LimitsSettings

_KNOWN = {
    "response_format": {"type", "json_schema", "schema"},
    "structured_outputs": {"json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace"},
}
_UNSUPPORTED = {
    "structured_outputs": ("structural_tag", "whitespace_pattern", "disable_additional_properties"),
}
_JSON_SCHEMA_KNOWN = {"name", "description", "strict", "schema"}

# White space within a line only: a run across lines would be retried at each of many empty lines.
_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


def check_members(fields: ConstraintFields) -> None:
    """Refuse members that are known but not supported.

    Raises:
        UnsupportedParameter: names the member.
    """
    for field_name, members in _UNSUPPORTED.items():
        given = getattr(fields, field_name)
        for name in members if isinstance(given, dict) else ():
            if given.get(name):
                raise refuse(f"{field_name}.{name}")


def read_constraint(fields: ConstraintFields) -> Constraint | None:
    """Return the constraint on the output; None if none is requested.

    Raises:
        InvalidRequest: a field is malformed, or more than one constraint is given.
    """
    asked = [*_response_format(fields.response_format), *_structured_outputs(fields), *_aliases(fields)]
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise InvalidRequest(f"{second}: not allowed together with {first}; give one of them", second)
    return asked[0] if asked else None


def _response_format(value: Any) -> Iterator[Constraint]:
    if value is None:
        return
    data, path = _object(value, "response_format"), "response_format"
    kind = data.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = "response_format.type: must be 'text', 'json_object' or 'json_schema'"
        raise InvalidRequest(message, "response_format.type")
    if kind == "json_object":
        schema = data.get("schema")
        yield _schema(schema, f"{path}.schema") if schema is not None else Constraint(kind="json_object", param=path)
    if kind == "json_schema":
        yield _json_schema(data)


def _structured_outputs(fields: ConstraintFields) -> Iterator[Constraint]:
    if fields.structured_outputs is None:
        return
    path = "structured_outputs"
    data = _object(fields.structured_outputs, path)
    for name, value in data.items():
        if name in _READERS and value is not None:
            yield _READERS[name](value, f"{path}.{name}")
    if _flag(data.get("json_object"), f"{path}.json_object"):
        yield Constraint(kind="json_object", param=f"{path}.json_object")


def _aliases(fields: ConstraintFields) -> Iterator[Constraint]:
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{name}")
        if value is not None:
            yield _READERS[name](value, f"guided_{name}")
    if fields.grammar is not None and fields.grammar != "":
        yield _grammar(fields.grammar, "grammar")
    if fields.json_schema is not None:
        yield _schema(fields.json_schema, "json_schema")


def find_ignored_in_constraints(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield paths of unknown members of the fields; ``data`` is the request."""
    for name, known in _KNOWN.items():
        given = data.get(name)
        if isinstance(given, dict):
            yield from (f"{name}.{key}" for key in given if key not in known and key not in _UNSUPPORTED.get(name, ()))
    response_format = data.get("response_format")
    inner = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if isinstance(inner, dict):
        yield from (f"response_format.json_schema.{key}" for key in inner if key not in _JSON_SCHEMA_KNOWN)


def _json_schema(data: Mapping[str, Any]) -> Constraint:
    """Read a ``response_format`` of type ``json_schema``: OpenAI's form, or the schema directly."""
    path = "response_format.json_schema"
    if data.get("json_schema") is None:
        if data.get("schema") is None:
            raise InvalidRequest(f"{path}: is required for this type, with the schema in {path}.schema", path)
        return _schema(data["schema"], "response_format.schema")
    inner = _object(data["json_schema"], path)
    for name in ("name", "description"):
        if inner.get(name) is not None and not isinstance(inner[name], str):
            raise InvalidRequest(f"{path}.{name}: must be a string", f"{path}.{name}")
    _flag(inner.get("strict"), f"{path}.strict")
    if inner.get("schema") is None:
        raise InvalidRequest(f"{path}.schema: is required", f"{path}.schema")
    return _schema(inner["schema"], f"{path}.schema")


def _schema(value: Any, path: str) -> Constraint:
    """Read a schema: an object or a boolean, or one of these as JSON in a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path}: is not valid JSON: {error}", path) from error
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{path}: must be a JSON Schema, an object", path)
    return Constraint(kind="json_schema", text=json.dumps(value), param=path)


def _regex(value: Any, path: str) -> Constraint:
    return _text("regex", value, path)


def _grammar(value: Any, path: str) -> Constraint:
    """Read a grammar; only GBNF uses ``::=``."""
    kind: ConstraintKind = "gbnf" if isinstance(value, str) and _GBNF_RULE.search(value) else "lark"
    return _text(kind, value, path)


def _text(kind: ConstraintKind, value: Any, path: str) -> Constraint:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}: must be a string", path)
    if not value:
        raise InvalidRequest(f"{path}: must not be empty", path)
    return Constraint(kind=kind, text=value, param=path)


def _choice(value: Any, path: str) -> Constraint:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path}: must be a list of at least one string", path)
    for index, choice in enumerate(value):
        if not isinstance(choice, str):
            raise InvalidRequest(f"{path}[{index}]: must be a string", f"{path}[{index}]")
    return Constraint(kind="choice", text=json.dumps(value), param=path)


_READERS = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be an object", path)
    return value


_STREAM_OPTIONS = frozenset(attribute.name for attribute in attrs.fields(StreamOptions))


def _flag(value: Any, path: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{path}: must be true or false", path)
    return bool(value)


@frozen(kw_only=True)
class GenerationBody(RequestBody, GenerationFields):
    """Base of the bodies of both generating endpoints. The fields are rows of the table of request fields."""

    def check(self, limits: LimitsSettings) -> None:
        """Check rules that involve several fields or the server's limits. Raises RequestError."""
        check_members(self)
        if self.n > limits.max_choices:
            raise InvalidRequest(f"n: must be at most {limits.max_choices}, not {self.n}", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")
        if self.return_progress and not self.stream:
            raise InvalidRequest("return_progress: only allowed when stream is true", "return_progress")

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of unknown fields inside known ones; ``data`` is the decoded data."""
        yield from (f"stream_options.{key}" for key in data.get("stream_options", ()) if key not in _STREAM_OPTIONS)
        yield from find_ignored_in_constraints(data)
        yield from find_ignored_in_lora(data.get("lora"))

    def constraint(self) -> Constraint | None:
        """Return the constraint on the output. Raises InvalidRequest."""
        return read_constraint(self)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for every prompt token except the first; None reports nothing."""
        return 0 if self.loglikelihood and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def namespace(self) -> str:
        """The prefix-cache namespace within the caller's own."""
        # The same text may be written in two ways, but only with the salt, known only to those who share it.
        return f"{self.cache_salt}\0{self.prompt_cache_key}" if self.prompt_cache_key else self.cache_salt

    @property
    def num_choices(self) -> int:
        """Number of choices to sample per prompt, including those that are not returned."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self, request_id: str, **prompt: Any) -> GenerateRequest:
        """Return the request of the body; ``prompt`` is messages, text or token_ids, and their options."""
        adapters_param, adapters = read_adapters({name: getattr(self, name) for name in ADAPTER_FIELDS})
        return GenerateRequest(
            request_id=request_id,
            model=self.model,
            num_choices=self.num_choices,
            sampling=self.sampling(),
            stopping=self.stopping(),
            constraint=self.constraint(),
            num_prompt_logprobs=self.num_prompt_logprobs,
            namespace=self.namespace,
            adapters=adapters,
            adapters_param=adapters_param,
            log_prompt=self.log_prompt,
            includes_stop=self.include_stop_str_in_output,
            **self.options(),
            **prompt,
        )
