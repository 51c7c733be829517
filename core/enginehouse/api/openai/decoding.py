"""Request bodies: decodes plain JSON data to strict attrs classes; every field is applied, refused or listed.

A decoder is created once, for the endpoint's body class and the fields that plugins declare. Values are never coerced;
errors contain the path of the field. Does not know any endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import attrs
from attrs import field, frozen
from attrs.validators import ge, le, optional
from cattrs import Converter

from enginehouse.api.http.body import KEEPS_NULLS, check_depth, parse_object, without_nulls
from enginehouse.api.http.callers import Caller
from enginehouse.api.openai.compression import find_ignored_in_compression, read_compression
from enginehouse.api.openai.constraints import ConstraintFields, find_ignored_in_constraints
from enginehouse.api.openai.encoding import encode_json
from enginehouse.api.openai.unsupported import find_unsupported, is_known, refuse
from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.parameters import read_extensions, request_converter
from enginehouse.serving.background import aside
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.structuring import find_problems

__all__ = [
    "MAX_TOKEN_IDS",
    "BodyDecoder",
    "Decoded",
    "GenerationBody",
    "RequestBody",
    "StreamOptions",
    "decode_problem",
    "name_list",
]

_B_co = TypeVar("_B_co", bound="RequestBody", covariant=True)

MAX_TOKEN_IDS = 2**20
"""Maximum number of token ids that are converted to text at once."""

_LARGE_BYTES = 262_144  # decoded in about 10 ms
_MAX_HEADER_CHARS = 1000
_MAX_SALT_CHARS = 1000
_MAX_MEMBERS = 65_536
"""Maximum number of members of an object such as ``logit_bias``: collecting all their errors takes time."""


def _check_salt(_: Any, attribute: Any, value: str) -> None:
    if len(value) > _MAX_SALT_CHARS:
        raise ValueError(f"'{attribute.name}' must have at most {_MAX_SALT_CHARS} characters, not {len(value)}")


@frozen(kw_only=True)
class StreamOptions:
    """``stream_options``. Obfuscation pads streams to hide lengths from eavesdroppers; accepted, without effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


@frozen(kw_only=True)
class RequestBody:
    """Base of all body classes."""

    def check(self, limits: LimitsSettings) -> None:
        """Check rules that involve several fields or the server's limits. Raises InvalidRequest."""

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of fields in ``data``, the decoded data, that have no effect."""
        yield from ()


@frozen(kw_only=True)
class GenerationBody(RequestBody, ConstraintFields):
    """Fields of both generation endpoints other than the sampling parameters and the constraint.

    Attributes:
        n: number of choices.
        priority: lower numbers are served earlier.
        cache_salt: prompts share the prefix cache only with those of the same salt; at most 1000 characters.
        cache_prompt: reuse cached prefixes, and add the tokens of this request to the prefix cache.
        prompt_cache_key: like ``cache_salt``, by OpenAI's name; both may be given.
        loglikelihood: report the log-probabilities of the prompt's tokens, except the first.
        prompt_logprobs: the same with this many alternatives, by token id.
        token_details: report the origin of each token; only with log-probabilities.
        compression: shorten the prompt: false, true, or an object with ``method`` and ``ratio``.
        log_prompt: allow the server to log the prompt, if its settings allow it as well.
        user: this and the following fields are accepted for compatibility; they have no effect.
    """

    model: str | None = None
    n: int = field(default=1, validator=ge(1))
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = field(default=0, validator=[ge(-(2**31)), le(2**31 - 1)])
    cache_salt: str = field(default="", validator=_check_salt)
    cache_prompt: bool = True
    prompt_cache_key: str | None = field(default=None, validator=optional(_check_salt))
    loglikelihood: bool = False
    prompt_logprobs: int | None = field(default=None, validator=optional([ge(0), le(20)]))
    token_details: bool = False
    compression: Any = None
    log_prompt: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def check(self, limits: LimitsSettings) -> None:
        """Check rules that involve several fields or the server's limits. Raises RequestError."""
        self.check_members()
        if self.n > limits.max_choices:
            raise InvalidRequest(f"n: must be at most {limits.max_choices}, not {self.n}", "n")
        read_compression(self.compression)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only allowed when stream is true", "stream_options")

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of unknown fields inside known ones; ``data`` is the decoded data."""
        known = {attribute.name for attribute in attrs.fields(StreamOptions)}
        yield from (f"stream_options.{key}" for key in data.get("stream_options", ()) if key not in known)
        yield from find_ignored_in_compression(data.get("compression"))
        yield from find_ignored_in_constraints(data)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for every prompt token except the first; None reports nothing."""
        return 0 if self.loglikelihood and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def asks_for_scores(self) -> bool:
        """True if the response includes log-probabilities of the prompt."""
        return self.loglikelihood or self.prompt_logprobs is not None

    @property
    def num_choices(self) -> int:
        """Number of choices to sample per prompt, including those that are not returned."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


@frozen(kw_only=True)
class Decoded(Generic[_B_co]):
    """A decoded body.

    Attributes:
        caller: the sender.
        extensions: plugin name to that plugin's request fields.
        given: the fields of the body and of plugins that the client sent.
        ignored: paths of unknown fields.
        unsupported: paths of unsupported fields; empty unless the settings say ``report``.
        is_large: True if processing the body may take long, so that it runs off the event loop.
    """

    body: _B_co
    caller: Caller
    extensions: dict[str, dict[str, Any]]
    given: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    is_large: bool = False

    def request(self: Decoded[GenerationBody], request_id: str, **prompt: Any) -> GenerateRequest:
        """Return the body's request; ``prompt`` is messages, text or token_ids, and their options."""
        body = self.body
        return GenerateRequest(
            request_id=request_id,
            model=body.model,
            num_choices=body.num_choices,
            sampling=body.sampling(),
            stopping=body.stopping(),
            extensions=self.extensions,
            constraint=body.constraint(),
            num_prompt_logprobs=body.num_prompt_logprobs,
            token_details=body.token_details,
            compression=read_compression(body.compression),
            priority=body.priority,
            namespace=self.caller.namespace(body.cache_salt, body.prompt_cache_key),
            cache_prompt=body.cache_prompt,
            profile=self.caller.profile.name,
            caller=self.caller.name,
            allowed_models=self.caller.allowed_models,
            is_large=self.is_large,
            **prompt,
        )

    def headers(self, left_out: Iterable[str] = ()) -> list[tuple[str, str]]:
        """Return response headers that name fields without effect; the model does not support those in ``left_out``."""
        headers = []
        if self.ignored:
            headers.append(("x-enginehouse-ignored", name_list(self.ignored)))
        if unsupported := (*self.unsupported, *left_out):
            headers.append(("x-enginehouse-unsupported", name_list(unsupported)))
        return headers


class BodyDecoder(Generic[_B_co]):
    """Decodes the bodies of one endpoint.

    Args:
        body_class: the class to decode into.
        samplers: plugins whose request fields are accepted as well.
        unsupported: ``reject`` refuses known but unsupported fields, ``report`` lists them.
        logs_prompts: the server may log prompts; otherwise ``log_prompt`` is listed as ignored.
    """

    def __init__(
        self,
        body_class: type[_B_co],
        samplers: Mapping[str, SamplerPlugin],
        limits: LimitsSettings,
        unsupported: Literal["reject", "report"],
        *,
        logs_prompts: bool = False,
    ) -> None:
        self._body_class = body_class
        self._samplers = samplers
        self._limits = limits
        self._rejects = unsupported == "reject"
        self._logs_prompts = logs_prompts
        self._converter: Converter = request_converter()
        self._own = frozenset(attribute.name for attribute in attrs.fields(body_class))
        self._keeping_nulls = frozenset(
            a.name for a in attrs.fields(body_class) if KEEPS_NULLS.items() <= a.metadata.items()
        )
        self._declared = frozenset(
            a.name for sampler in samplers.values() for a in attrs.fields(sampler.request_fields)
        )

    async def read(self, body: bytes, caller: Caller) -> Decoded[_B_co]:
        """Run :meth:`decode`, off the event loop for a large body."""
        return await aside(len(body) >= _LARGE_BYTES, lambda: self.decode(body, caller))

    def decode(self, body: bytes, caller: Caller) -> Decoded[_B_co]:
        """Decode and check a body.

        Raises:
            InvalidRequest: a field is invalid; ``param`` names it.
            UnsupportedParameter: a field is not supported.
        """
        data = parse_object(body)
        unsupported = find_unsupported(data, self._declared, self._own)
        if unsupported and self._rejects:
            raise refuse(unsupported[0])
        self._check_sizes(data, len(body))
        try:
            known = {}
            for name, value in data.items():
                is_known_here = name in self._own or name in self._declared
                keeps_nulls = name in self._keeping_nulls or not is_known_here
                kept = (check_depth if keeps_nulls else without_nulls)(value, self._limits.max_json_depth)
                if is_known_here:
                    known[name] = kept
            if caller.profile.usage_by_default and isinstance(known.get("stream_options"), dict):
                known["stream_options"].setdefault("include_usage", True)
        except (InvalidRequest, RecursionError) as error:
            raise InvalidRequest(str(error)) from error
        structured, extensions = self._structure(known, unsupported)
        return Decoded(
            body=structured,
            caller=caller,
            extensions=extensions,
            given=frozenset(known),
            ignored=(*self._find_ignored(data), *self._body_class.find_ignored(known)),
            unsupported=tuple(unsupported),
            is_large=len(body) >= _LARGE_BYTES,
        )

    def _structure(self, known: dict[str, Any], unsupported: list[str]) -> tuple[_B_co, dict[str, dict[str, Any]]]:
        """Return the checked body and the plugins' fields; moves unsupported ones from ``known`` to ``unsupported``."""
        while True:
            try:
                structured = self._converter.structure(known, self._body_class)
                extensions = read_extensions(self._converter, known, self._samplers)
            except RecursionError as error:
                raise InvalidRequest(str(error)) from error
            except Exception as error:
                raise decode_problem(error) from error
            try:
                structured.check(self._limits)
            except UnsupportedParameter as error:
                if self._rejects or error.param is None or not _leave_out(known, error.param):
                    raise
                unsupported.append(error.param)
            else:
                return structured, extensions

    def _check_sizes(self, data: Mapping[str, Any], num_bytes: int) -> None:
        limits = self._limits
        most_items = {"messages": limits.max_messages, "stop": limits.max_stop, "tokens": MAX_TOKEN_IDS}
        for name, most in most_items.items():
            value = data.get(name)
            if isinstance(value, list) and len(value) > most:
                raise InvalidRequest(f"{name}: must hold at most {most} items, not {len(value)}", name)
        if num_bytes > limits.max_message_bytes:
            _check_messages(data.get("messages"), limits.max_message_bytes)
        for name, value in data.items():
            if isinstance(value, dict) and len(value) > _MAX_MEMBERS:
                raise InvalidRequest(f"{name}: must hold at most {_MAX_MEMBERS} members, not {len(value)}", name)

    def _find_ignored(self, data: Mapping[str, Any]) -> Iterable[str]:
        for name in data:
            if name not in self._own and name not in self._declared and not is_known(name):
                yield name
        if not self._logs_prompts and "log_prompt" in self._own and data.get("log_prompt"):
            yield "log_prompt"


def _leave_out(data: dict[str, Any], path: str) -> bool:
    """Remove the member at a dotted path from ``data``; returns False if there is none."""
    *outer, name = path.split(".")
    for step in outer:
        inner = data.get(step)
        if not isinstance(inner, dict):
            return False
        data = inner
    return data.pop(name, None) is not None


def _check_messages(messages: Any, max_bytes: int) -> None:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        num_bytes = len(encode_json(message))
        if num_bytes > max_bytes:
            where, limit = f"messages[{index}]", f"{max_bytes} bytes (limits.max_message_bytes)"
            raise InvalidRequest(f"{where}: must have at most {limit}, not {num_bytes}", where)


def decode_problem(error: Exception, path: str = "") -> InvalidRequest:
    """Return a strict converter's errors as one refusal; ``param`` is the first field."""
    problems = list(find_problems(error, path))
    # The converter's messages say "table", as for configuration files.
    message = "; ".join(map(str, problems[:5])).replace("a table", "an object")
    return InvalidRequest(message, problems[0].path or None)


def name_list(names: Iterable[str]) -> str:
    """Return field names as a header value, escaped and shortened: clients choose their characters and number."""
    shown: list[str] = []
    num_chars, names = 0, list(names)
    for name in names:
        text = name[:100].encode("ascii", "backslashreplace").decode()
        text = "".join(char if char.isprintable() and char not in ',"' else "?" for char in text)
        num_chars += len(text) + 2
        if num_chars > _MAX_HEADER_CHARS:
            shown.append(f"and {len(names) - len(shown)} more")
            break
        shown.append(text)
    return ", ".join(shown)
