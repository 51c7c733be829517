"""Request bodies: decodes plain JSON data to strict attrs classes; every field is applied, refused or listed.

A decoder is created once, for the endpoint's body class and the fields that plugins declare. Values are never coerced;
errors contain the path of the field. Does not know any endpoint.

Replaces Litestar's DTOs, which drop unknown fields silently and convert some values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import parse_qsl

import attrs
from attrs import evolve, field, frozen
from cattrs import Converter
from litestar.types import Scope

from enginehouse.api.generation.running_answers import MediaMemory
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.http.body import check_depth, parse_object, without_nulls
from enginehouse.api.http.callers import Caller
from enginehouse.api.http.frames import encode_json
from enginehouse.api.http.security import memory_of
from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter
from enginehouse.contract.fields import ParameterFields
from enginehouse.contract.refusals import REFUSED, Refusal, refuse
from enginehouse.contract.rows import RequestField, classes_of, details_class, row_of
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.parameters import read_extensions, request_converter
from enginehouse.plugins import Guard
from enginehouse.serving.background import run_in_thread
from enginehouse.settings.config import LimitsSettings
from enginehouse.settings.structuring import Problem, converting, find_wide_integer

_B_co = TypeVar("_B_co", bound="RequestBody", covariant=True)

MAX_TOKEN_IDS = 2**20
"""Maximum number of token ids that are converted to text at once."""

_LARGE_BYTES = 262_144  # decoded in about 10 ms
_MAX_HEADER_CHARS = 1000
_FIELDS = "reading of its request fields"
_MAX_MEMBERS = 65_536
"""Maximum number of members of an object such as ``logit_bias``: collecting all their errors takes time."""


@frozen(kw_only=True)
class RequestBody:
    """Base of all body classes."""

    def check(self, limits: LimitsSettings) -> None:
        """Check rules that involve several fields or the server's limits. Raises InvalidRequest."""

    @staticmethod
    def find_ignored(data: Mapping[str, Any]) -> Iterator[str]:
        """Yield paths of fields in ``data``, the decoded data, that have no effect."""
        yield from ()


_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


class _Headers(Mapping[str, str]):
    """The request headers without credentials, by names in any case."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[str, str] = {}
        for raw_name, value in scope["headers"]:
            name = raw_name.decode("latin-1").lower()
            if name not in _CREDENTIALS:
                before = self._values.get(name)
                text = value.decode("latin-1")
                self._values[name] = text if before is None else f"{before}, {text}"

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@frozen(kw_only=True)
class DecodedCall(Generic[_B_co]):
    """A request with its decoded body: a :class:`enginehouse.contract.calls.Call`.

    Attributes:
        server: core, for the request's surface.
        extensions: name of a sampler or preparer to its request fields.
        given: the fields of the body and of plugins that the client sent.
        ignored: paths of unknown fields, and of others without effect.
        unsupported: paths of unsupported fields; empty unless the settings say ``report``.
        rejects: unsupported fields are refused.
        paths: places of parameters that the body has elsewhere, by field.
        is_large: True if processing the body may take long, so that it runs off the event loop.
        are_foreign: some fields may be those of plugins that are not our own.
        guards: guards of the objects that declare such fields, by name of the field.
    """

    body: _B_co
    server: ServerAccess = field(eq=False, repr=False)
    extensions: dict[str, dict[str, Any]] = field(factory=dict)
    given: frozenset[str] = frozenset()
    ignored: list[str] = field(factory=list)
    unsupported: list[str] = field(factory=list)
    is_large: bool = False
    are_foreign: bool = False
    guards: Mapping[str, Guard] = MappingProxyType({})
    rejects: bool = True
    paths: dict[str, str] = field(factory=dict)

    @property
    def caller(self) -> Caller:
        """The sender."""
        return self.server.caller

    @property
    def path(self) -> dict[str, str]:
        """The parameters of the route's path."""
        return {name: str(value).removeprefix("/") for name, value in self.server.scope["path_params"].items()}

    @property
    def query(self) -> dict[str, str]:
        """The parameters after the ``?``."""
        values: dict[str, str] = {}
        for name, value in parse_qsl(self.server.scope["query_string"].decode("latin-1"), keep_blank_values=True):
            values[name] = f"{values[name]},{value}" if name in values else value
        return values

    @property
    def headers(self) -> Mapping[str, str]:
        """The request headers, without credentials."""
        return _Headers(self.server.scope)

    def parameters(self, values: Mapping[str, Any], paths: Mapping[str, str]) -> ParameterFields:
        """Read parameters that the body has elsewhere; those of plugins are added to :attr:`extensions`."""
        plugin_fields, converter = self.server.state.registry.request_fields, request_converter()
        own = {attribute.name for attribute in attrs.fields(ParameterFields)}
        self.paths.update(paths)
        _check_sizes(values, self.server.state.settings.limits, paths)
        self.ignored.extend(paths[name] for name in values if name not in own and name not in plugin_fields)
        with converting(lambda problems: _at(refusal_of(problems), paths)):
            read: ParameterFields = converter.structure(
                {name: value for name, value in values.items() if name in own}, ParameterFields
            )
            extensions = self._read_extensions(values, plugin_fields)
        for owner, fields in extensions.items():
            self.extensions.setdefault(owner, {}).update(fields)
        return read

    def _read_extensions(
        self, values: Mapping[str, Any], declared: Mapping[str, RequestField]
    ) -> dict[str, dict[str, Any]]:
        def read() -> dict[str, dict[str, Any]]:
            return read_extensions(request_converter(), values, classes_of(declared.values()))

        guard = next((self.guards[name] for name in values if name in self.guards), None)
        return read() if guard is None else guard.wait_for(_FIELDS, read)

    def ignore_unused(self, request: GenerateRequest) -> None:
        """List parameters of a request of the body as ignored that only act together with another one."""
        given = request.sampling
        if given.get("post_sampling_probs") and "num_logprobs" not in given:
            self.ignore(self.paths.get("post_sampling_probs", "post_sampling_probs"))

    def ignore(self, path: str) -> None:
        """List the field at a path as ignored."""
        self.ignored.append(path)

    def leave_out(self, path: str, reason: str) -> None:
        """List the field at a path as unsupported, or refuse it, as the settings say."""
        if self.rejects:
            raise UnsupportedParameter(f"{path}: {reason}", path)
        self.unsupported.append(path)

    def identify(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request of the body with what core knows of its caller, the plugins' fields, and its memory."""
        caller = self.caller
        return evolve(
            request,
            extensions=self.extensions,
            namespace=caller.namespace(request.namespace),
            profile=caller.profile.name,
            caller=caller.name,
            allowed_models=caller.allowed_models,
            is_large=self.is_large,
            hold=MediaMemory(memory_of(self.server.scope)),
        )

    def notices(self, left_out: Iterable[str] = ()) -> list[tuple[str, str]]:
        """Return response headers that name fields without effect; the model does not support those in ``left_out``."""
        headers = []
        if self.ignored:
            headers.append(("x-enginehouse-ignored", name_list(dict.fromkeys(self.ignored))))
        if unsupported := (*self.unsupported, *left_out):
            headers.append(("x-enginehouse-unsupported", name_list(unsupported)))
        return headers


class BodyDecoder(Generic[_B_co]):
    """Decodes the bodies of one endpoint.

    Args:
        body_class: the class to decode into.
        plugin_fields: fields of plugins, by name; accepted as well.
        unsupported: ``reject`` refuses known but unsupported fields, ``report`` lists them.
        logs_prompts: the server may log prompts; otherwise ``log_prompt`` is listed as ignored.
        absences: why installed plugins do not work, by name. A field or sampling step of such a name is refused.
        foreign: guards of the plugin objects that are not our own, by their fields; their validators run in threads.
    """

    def __init__(
        self,
        body_class: type[_B_co],
        plugin_fields: Mapping[str, RequestField],
        limits: LimitsSettings,
        unsupported: Literal["reject", "report"],
        *,
        logs_prompts: bool = False,
        absences: Mapping[str, str] = MappingProxyType({}),
        foreign: Mapping[str, Guard] = MappingProxyType({}),
    ) -> None:
        self._guards = foreign
        self._foreign = {name.encode(): guard for name, guard in foreign.items()}
        self._body_class = body_class
        self._plugin_classes = classes_of(plugin_fields.values())
        self._limits = limits
        self._rejects = unsupported == "reject"
        self._logs_prompts = logs_prompts
        self._converter: Converter = request_converter()
        # What OpenAI's fields mean is nothing to the bodies of other surfaces.
        is_ours = issubclass(body_class, RequestBody)
        self._refused: Mapping[str, Refusal] = (
            {**{name: Refusal(why, (None,)) for name, why in absences.items()}, **REFUSED} if is_ours else {}
        )
        self._absences = absences
        self._own = frozenset(attribute.name for attribute in attrs.fields(body_class))
        self._keeping_nulls = frozenset(a.name for a in attrs.fields(body_class) if row_of(a).keeps_nulls)
        self._declared = {name: details_class(declared.attribute.type) for name, declared in plugin_fields.items()}

    async def read(self, body: bytes, server: ServerAccess) -> DecodedCall[_B_co]:
        """Run :meth:`decode`, off the event loop for a large body and for one that names fields of other plugins."""
        for name, guard in self._foreign.items():
            if name in body:
                return await guard.run(_FIELDS, lambda: self.decode(body, server))
        return await run_in_thread(len(body) >= _LARGE_BYTES, lambda: self.decode(body, server))

    def decode(self, body: bytes, server: ServerAccess) -> DecodedCall[_B_co]:
        """Decode and check the body of a request.

        Raises:
            InvalidRequest: a field is invalid; ``param`` names it.
            UnsupportedParameter: a field is not supported.
        """
        data, caller = parse_object(body), server.caller
        refusals = {name: self._refused[name] for name in data if name in self._refused and not self._is_known(name)}
        unsupported = [name for name, refusal in refusals.items() if not refusal.is_off(data[name])]
        if unsupported and self._rejects:
            raise refuse(unsupported[0], self._absences)
        _check_sizes(data, self._limits)
        if len(body) > self._limits.max_message_bytes:
            _check_messages(data.get("messages"), self._limits.max_message_bytes)
        self._check_steps(data.get("samplers"))
        try:
            known = {}
            for name, value in data.items():
                is_known_here = self._is_known(name)
                keeps_nulls = name in self._keeping_nulls or not is_known_here
                kept = (check_depth if keeps_nulls else without_nulls)(value, self._limits.max_json_depth)
                if is_known_here:
                    known[name] = kept
            if caller.profile.usage_by_default and isinstance(known.get("stream_options"), dict):
                known["stream_options"].setdefault("include_usage", True)
        except (InvalidRequest, RecursionError) as error:
            raise InvalidRequest(str(error)) from error
        is_ours = issubclass(self._body_class, RequestBody)  # whose fields have bounds
        if not is_ours and (wide := find_wide_integer(known, "")) is not None:
            path, digits = wide
            raise InvalidRequest(f"{path}: {digits} does not fit 64 bits", path)
        structured, extensions = self._structure(known, unsupported)
        inner = self._body_class.find_ignored(known) if is_ours else ()
        return DecodedCall(
            body=structured,
            extensions=extensions,
            given=frozenset(known),
            ignored=[*self._find_ignored(data), *inner],
            unsupported=unsupported,
            is_large=len(body) >= _LARGE_BYTES,
            are_foreign=any(name in body for name in self._foreign),
            guards=self._guards,
            rejects=self._rejects,
            server=server,
        )

    def _structure(self, known: dict[str, Any], unsupported: list[str]) -> tuple[_B_co, dict[str, dict[str, Any]]]:
        """Return the checked body and the plugins' fields; moves unsupported ones from ``known`` to ``unsupported``."""
        while True:
            with converting(refusal_of):
                structured = self._converter.structure(known, self._body_class)
                extensions = read_extensions(self._converter, known, self._plugin_classes)
            try:
                if isinstance(structured, RequestBody):
                    structured.check(self._limits)
            except UnsupportedParameter as error:
                if self._rejects or error.param is None or not _leave_out(known, error.param):
                    raise
                unsupported.append(error.param)
            else:
                return structured, extensions

    def _is_known(self, name: str) -> bool:
        return name in self._own or name in self._declared

    def _check_steps(self, samplers: Any) -> None:
        for name in samplers if isinstance(samplers, list) else ():
            if isinstance(name, str) and name in self._absences:
                raise UnsupportedParameter(f"samplers: unknown step {name!r}: {self._absences[name]}", "samplers")

    def _find_ignored(self, data: Mapping[str, Any]) -> Iterable[str]:
        for name in data:
            if not self._is_known(name) and name not in self._refused:
                yield name
            details = self._declared.get(name)
            if details is not None:
                yield from _find_unknown(details, data[name], name)
        if not issubclass(self._body_class, RequestBody):  # the bodies of core name such members by themselves
            members = _shape_of(self._body_class).members or {}
            for name, value in data.items():
                if name in members:
                    yield from _find_unknown(members[name], value, name)
        if not self._logs_prompts and "log_prompt" in self._own and data.get("log_prompt"):
            yield "log_prompt"


@frozen
class _Shape:
    """The members and items that the JSON of a type may hold.

    Attributes:
        members: types of the members of its attrs classes, by name; None if it has none.
        item: type of the items of its lists; None if it has none.
    """

    members: Mapping[str, Any] | None
    item: Any


@functools.cache
def _shape_of(kind: Any) -> _Shape:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    classes = [attrs.fields(attrs.resolve_types(option)) for option in options if attrs.has(option)]
    members = {one.name: one.type for fields in reversed(classes) for one in fields}
    items = [get_args(option)[0] for option in options if get_origin(option) in (tuple, list, Sequence)]
    return _Shape(members if classes else None, items[0] if items else None)


def _find_unknown(kind: Any, value: Any, path: str) -> Iterator[str]:
    """Yield paths of members of ``value``, at any depth, that no attrs class in its type has."""
    if not isinstance(value, dict | list):
        return
    shape = _shape_of(kind)
    if isinstance(value, dict) and shape.members is not None:
        for name, member in value.items():
            here = f"{path}.{name}"
            yield from _find_unknown(shape.members[name], member, here) if name in shape.members else (here,)
    elif isinstance(value, list) and shape.item is not None:
        for index, item in enumerate(value):
            yield from _find_unknown(shape.item, item, f"{path}[{index}]")


def _leave_out(data: dict[str, Any], path: str) -> bool:
    """Remove the member at a dotted path from ``data``; returns False if there is none."""
    *outer, name = path.split(".")
    for step in outer:
        inner = data.get(step)
        if not isinstance(inner, dict):
            return False
        data = inner
    return data.pop(name, None) is not None


def _check_sizes(
    data: Mapping[str, Any], limits: LimitsSettings, paths: Mapping[str, str] = MappingProxyType({})
) -> None:
    most_items = {"messages": limits.max_messages, "tokens": MAX_TOKEN_IDS}
    most_items |= dict.fromkeys(("stop", "stop_regex"), limits.max_stop)
    for name, value in data.items():
        most, path = most_items.get(name), paths.get(name, name)
        if most is not None and isinstance(value, list) and len(value) > most:
            raise InvalidRequest(f"{path}: must hold at most {most} items, not {len(value)}", path)
        if isinstance(value, dict) and len(value) > _MAX_MEMBERS:
            raise InvalidRequest(f"{path}: must hold at most {_MAX_MEMBERS} members, not {len(value)}", path)


def _check_messages(messages: Any, max_bytes: int) -> None:
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        num_bytes = len(encode_json(message))
        if num_bytes > max_bytes:
            where, limit = f"messages[{index}]", f"{max_bytes} bytes (limits.max_message_bytes)"
            raise InvalidRequest(f"{where}: must have at most {limit}, not {num_bytes}", where)


def refusal_of(problems: Sequence[Problem]) -> InvalidRequest:
    """Return a strict converter's problems as one refusal; ``param`` is the first field."""
    # The converter's messages say "table", as for configuration files.
    message = "; ".join(map(str, problems[:5])).replace("a table", "an object")
    return InvalidRequest(message, problems[0].path or None)


def _at(error: InvalidRequest, paths: Mapping[str, str]) -> InvalidRequest:
    """Return an error about a field with the path by which the client wrote it."""
    name = (error.param or "").partition("[")[0].partition(".")[0]
    path = paths.get(name, name)
    return InvalidRequest(str(error).replace(name, path) if name else str(error), path or None)


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
