"""Probes the kind and capabilities of a server once, while the model is opened. Blocking: called off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard, get_args
from urllib.parse import quote

import httpx
import msgspec
from attrs import evolve, frozen

from enginehouse.contract.backend import Progress
from enginehouse.contract.errors import EngineDead, ModelLoadError
from enginehouse.contract.types import ConstraintKind, EngineCapabilities, ModelInfo, PoolingInfo, Task
from enginehouse_remote.kinds import ALL_PARAMETERS, KINDS, KindOfServer
from enginehouse_remote.options import Kind, RemoteOptions
from enginehouse_remote.reading import IDENTITY, AnswerUnreadable, read_body
from enginehouse_remote.tei import ServedModel, read_info, root_of

__all__ = ["Found", "engine_capabilities", "probe_servers", "restricted"]

_UNLIMITED = 2**31 - 1
_PAUSE_S = 0.5
_MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of a list of models; the longest public ones have a quarter of that."""
_MAX_MEMBERS = 256
_MAX_NAME_CHARS = 512
_MAX_TEXT_CHARS = 2000
_NOT_PASSED_ON = "it is not passed on to remote servers"
_OWNERS: Mapping[str, Kind] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "enginehouse": "enginehouse"}
_CONTEXT_KEYS = ("max_context", "max_model_len", "context_length", "context_window")
_OF_MODEL = ("alias", "model", "generation_config")
_KIND_OF_FIELD: Mapping[str, tuple[ConstraintKind, ...]] = {
    "json_schema": ("json_object", "json_schema"),
    "guided_regex": ("regex",),
    "guided_choice": ("choice",),
    "guided_grammar": ("lark", "gbnf"),
}


@frozen(kw_only=True)
class Found:
    """Probed properties of the servers of a model.

    Attributes:
        model: the model's name on the servers.
        kind: API dialect of the servers.
        name_of_kind: its name.
        tokenizes: they provide Enginehouse's ``/tokenize`` and ``/detokenize``.
        max_inputs: most inputs of one request to a server of TEI.
    """

    model: str
    kind: KindOfServer
    name_of_kind: Kind
    info: ModelInfo
    tokenizes: bool
    max_inputs: int = _UNLIMITED


def probe_servers(urls: Sequence[str], headers: Mapping[str, str], options: RemoteOptions, progress: Progress) -> Found:
    """Probe the first server that answers; all are assumed to be equal.

    Raises:
        EngineDead: none answers in time; a retry may help.
        ModelLoadError: a server answers, but is not usable, or lacks the model.
    """
    # On a thread with its own event loop: only a loop can time out a whole answer, and the caller's may be running.
    with ThreadPoolExecutor(1, "remote probe") as thread:
        return thread.submit(lambda: asyncio.run(_probe_all(urls, headers, options, progress))).result()


async def _probe_all(
    urls: Sequence[str], headers: Mapping[str, str], options: RemoteOptions, progress: Progress
) -> Found:
    began, problem = time.monotonic(), ""
    limit_s = options.connect_timeout_s
    async with httpx.AsyncClient(headers={**headers, **IDENTITY}, timeout=limit_s, trust_env=False) as client:
        while True:
            for url in urls:
                progress(0.0, f"asking {url}")
                try:
                    return await _probe(client, url, options)
                except AnswerUnreadable as error:
                    raise ModelLoadError(f"{url} does not say what it serves: {error}") from error
                except TimeoutError:
                    problem = f"{url}: no whole answer within {limit_s:g} s"
                except httpx.HTTPError as error:
                    problem = f"{url}: {error}"[:_MAX_NAME_CHARS]
            if time.monotonic() - began > options.start_timeout_s:
                raise EngineDead(f"no server of this model answers ({problem})")
            await asyncio.sleep(_PAUSE_S)


async def _get(client: httpx.AsyncClient, url: str, limit_s: float) -> tuple[int, Any]:
    """Return the status of a response and its JSON, or None; bounded in bytes and total time."""
    async with asyncio.timeout(limit_s), client.stream("GET", url) as response:
        status = response.status_code
        body = await read_body(response, _MAX_BYTES) if status == 200 else b""
    try:
        return status, msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return status, None


async def _probe(client: httpx.AsyncClient, url: str, options: RemoteOptions) -> Found:
    if options.kind == "tei":
        if (served := await _tei_model(client, url, options)) is None:
            root = root_of(url)
            raise ModelLoadError(f"{root}/info describes no pooling model; is {root} a server of TEI?")
        return _found_tei(url, served, options)
    try:
        entries = await _models(client, url, options.connect_timeout_s)
    except ModelLoadError:
        if options.kind != "auto" or (served := await _tei_model(client, url, options)) is None:
            raise
        return _found_tei(url, served, options)
    entry = _choose(entries, options.model, url)
    name = str(entry["id"])
    kind: Kind = _OWNERS.get(str(entry.get("owned_by")), "openai") if options.kind == "auto" else options.kind
    description: dict[str, Any] = {}
    if kind == "enginehouse":
        _, said = await _get(client, f"{url}/models/{quote(name)}", options.connect_timeout_s)
        description = said if isinstance(said, dict) else {}
        if description.get("state") == "loading":
            raise httpx.TransportError("the model is still loading there")
    return _found(url, name, kind, entry, description=description, options=options)


async def _tei_model(client: httpx.AsyncClient, url: str, options: RemoteOptions) -> ServedModel | None:
    """Return the model of a server of Text Embeddings Inference, which has no list of models."""
    status, said = await _get(client, f"{root_of(url)}/info", options.connect_timeout_s)
    _check_status(status, url)
    return read_info(said)


def _found_tei(url: str, served: ServedModel, options: RemoteOptions) -> Found:
    root = root_of(url)
    name = str(_choose([{"id": served.model_id[:_MAX_NAME_CHARS]}], options.model, root)["id"])
    if options.task not in (None, served.task):
        raise ModelLoadError(f"task: {root} serves a model for {served.task!r}, not for {options.task!r}")
    reason = "the remote server (tei) does not generate"
    info = ModelInfo(
        backend="remote",
        max_context=options.context or served.max_input_length,
        vocab_size=_UNLIMITED,
        engine=engine_capabilities(KINDS["tei"], None, reason),
        metadata=_metadata({}, {}, root, name, "tei"),
        task=served.task or "embed",
        pooling=served.pooling,
    )
    kind = KINDS["tei"]
    max_inputs = served.max_client_batch_size
    return Found(model=name, kind=kind, name_of_kind="tei", info=info, tokenizes=False, max_inputs=max_inputs)


def _found(
    url: str, name: str, kind: Kind, entry: Mapping[str, Any], *, description: Mapping[str, Any], options: RemoteOptions
) -> Found:
    """Build the result from the server's model list and, for an Enginehouse server, its model description."""
    capabilities = _capabilities(description)
    table = restricted(KINDS[kind], capabilities, options)
    max_context = options.context or _context(description) or _context(entry) or _UNLIMITED
    reason = f"the remote server ({kind}) does not support it"
    engine = engine_capabilities(table, capabilities, reason)
    info = ModelInfo(
        backend="remote",
        max_context=max_context,
        vocab_size=_vocab_size(entry) or _UNLIMITED,
        engine=msgspec.structs.replace(engine, media=("image",) if options.images else ()),
        generation_defaults=_defaults(description),
        metadata=_metadata(description, entry, url, name, kind),
        task=options.task or _task(description),
        pooling=_pooling(description),
    )
    return Found(model=name, kind=table, name_of_kind=kind, info=info, tokenizes=kind == "enginehouse")


async def _models(client: httpx.AsyncClient, url: str, limit_s: float) -> list[dict[str, Any]]:
    status, said = await _get(client, f"{url}/models", limit_s)
    _check_status(status, url)
    entries = said.get("data") if isinstance(said, dict) else None
    if isinstance(entries, list) and all(map(_is_entry, entries)):
        return entries
    raise ModelLoadError(f"{url}/models lists no models (status {status}); is {url} an OpenAI-compatible API?")


def _check_status(status: int, url: str) -> None:
    if status in (401, 403):
        raise ModelLoadError(f"{url} does not take the API key of the settings (status {status})")
    if status >= 500 or status == 429:
        raise httpx.TransportError(f"status {status}")


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str) and len(entry["id"]) <= _MAX_NAME_CHARS


def _choose(models: Sequence[dict[str, Any]], wanted: str | None, url: str) -> dict[str, Any]:
    for entry in models:
        aliases = entry.get("aliases")
        if wanted in (None, entry["id"], *(aliases if isinstance(aliases, list) else ())):
            return entry
    listed = ", ".join(repr(entry["id"]) for entry in models[:20]) or "none"
    if wanted is None:
        raise ModelLoadError(f"{url} serves no model")
    raise ModelLoadError(f"{url} serves no model {wanted!r}; it serves: {listed}")


def _capabilities(description: Mapping[str, Any]) -> dict[str, dict[str, str]] | None:
    """Return the capabilities reported by an Enginehouse server, or None. Texts only."""
    said = description.get("capabilities")
    if not isinstance(said, dict):
        return None
    return {
        name: {key: text for key, text in one.items() if isinstance(text, str)}
        for name, one in list(said.items())[:_MAX_MEMBERS]
        if isinstance(one, dict)
    }


def restricted(kind: KindOfServer, capabilities: Any, options: RemoteOptions) -> KindOfServer:
    """Restrict the kind to this server's reported capabilities and the settings."""
    parameters, constraints = set(kind.parameters), kind.constraints
    if isinstance(capabilities, dict):
        refused = {name for name, said in capabilities.items() if said.get("support") == "refused"}
        # Fields of the server's sampler plugins, which this table cannot know; their capability names the plugin.
        plugins = {name for name, said in capabilities.items() if "by the plugin" in str(said.get("reason"))}
        parameters = (parameters | plugins) - refused
        constraints = tuple(one for field, kinds in _KIND_OF_FIELD.items() if field not in refused for one in kinds)
    parameters = (parameters | set(options.parameters)) - set(options.without)
    reported = capabilities.get("adapters", {}) if isinstance(capabilities, dict) else {}
    is_known = kind.adapters != "field" or reported.get("support", "refused") != "refused"
    adapters = kind.adapters if is_known and "adapters" not in options.without else None
    return evolve(kind, parameters=frozenset(parameters), constraints=constraints, adapters=adapters)


def engine_capabilities(kind: KindOfServer, said: Any, reason: str) -> EngineCapabilities:
    """Return the engine's capability for each parameter; ``said`` is the report of an Enginehouse server, if any."""
    reported = said if isinstance(said, dict) else {}
    reasons = {
        name: one.get("reason") if one.get("support") == "refused" else _NOT_PASSED_ON for name, one in reported.items()
    }
    return EngineCapabilities(
        takes_messages=True,
        native=tuple(sorted(kind.parameters)),
        refused={name: reasons.get(name) or reason for name in sorted(ALL_PARAMETERS - kind.parameters)},
        samplers=(),
        constraint_kinds=kind.constraints,
        constraint_problem=reason,
        adapters="none" if kind.adapters is None else "mixed",
    )


def _context(entry: Mapping[str, Any]) -> int | None:
    """Return the context size of a model object, by one of its usual names."""
    meta = entry.get("meta")
    candidates = [entry.get(key) for key in _CONTEXT_KEYS]
    if isinstance(meta, dict):
        candidates += [meta.get("n_ctx"), meta.get("n_ctx_train")]
    return next((value for value in candidates if _is_size(value)), None)


def _task(description: Mapping[str, Any]) -> Task:
    task = description.get("task")
    return task if task in get_args(Task) else "generate"


def _pooling(description: Mapping[str, Any]) -> PoolingInfo | None:
    """Return what an Enginehouse server reports about a pooling model; None for other models and servers."""
    try:
        return msgspec.convert(description.get("pooling"), PoolingInfo | None)
    except msgspec.ValidationError:
        return None


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 < value <= _UNLIMITED


def _vocab_size(entry: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size if a server (llama-server) reports it."""
    meta = entry.get("meta")
    value = meta.get("n_vocab") if isinstance(meta, dict) else None
    return value if _is_size(value) else None


def _defaults(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's default request values: shown and sent as defaults, so that both servers agree."""
    parameters = description.get("parameters")
    if not isinstance(parameters, dict):
        return {}
    return {
        name: one["value"]
        for name, one in list(parameters.items())[:_MAX_MEMBERS]
        if isinstance(one, dict) and one.get("origin") in _OF_MODEL and _is_short(one.get("value"))
    }


def _is_short(value: Any) -> bool:
    """True if it is a value within the size limit of a parameter, which other processes can receive."""
    try:
        return value is not None and len(msgspec.msgpack.encode(value)) <= _MAX_TEXT_CHARS
    except OverflowError:  # an integer beyond 64 bits
        return False


def _metadata(
    description: Mapping[str, Any], entry: Mapping[str, Any], url: str, name: str, kind: Kind
) -> dict[str, str]:
    own = description.get("metadata")
    shown = list(own.items())[:_MAX_MEMBERS] if isinstance(own, dict) else ()
    known = {key[:_MAX_NAME_CHARS]: str(value)[:_MAX_TEXT_CHARS] for key, value in shown}
    if isinstance(stamp := description.get("system_fingerprint"), str):
        known["remote_fingerprint"] = stamp[:_MAX_NAME_CHARS]
    return {**known, "remote_url": url, "remote_model": name, "remote_kind": kind}
