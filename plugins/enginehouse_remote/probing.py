"""Asks a server what it is and what it can do, once, while the model is opened. Blocking: called off the event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import httpx
import msgspec
from attrs import evolve, frozen

from enginehouse.backend import Progress
from enginehouse.errors import EngineDead, ModelLoadError
from enginehouse.types import ConstraintKind, EngineCapabilities, ModelInfo
from enginehouse_remote.kinds import ALL_PARAMETERS, KINDS, KindOfServer
from enginehouse_remote.options import Kind, RemoteOptions

__all__ = ["Found", "engine_capabilities", "probe_servers", "restricted"]

_UNLIMITED = 2**31 - 1
_PAUSE_S = 0.5
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
    """What is known about the servers of a model.

    Attributes:
        model: the model's name there.
        kind: how to speak to them.
        tokenizes: they offer ``/tokenize`` and ``/detokenize`` as Enginehouse does.
    """

    model: str
    kind: KindOfServer
    info: ModelInfo
    tokenizes: bool


def probe_servers(urls: Sequence[str], headers: Mapping[str, str], options: RemoteOptions, progress: Progress) -> Found:
    """Ask the first server that answers; all are taken to serve the same.

    Raises:
        EngineDead: none answers in time; trying again may help.
        ModelLoadError: a server answers, but is none that could be used, or lacks the model.
    """
    began, problem = time.monotonic(), ""
    with httpx.Client(headers=dict(headers), timeout=options.connect_timeout_s, trust_env=False) as client:
        while True:
            for url in urls:
                progress(0.0, f"asking {url}")
                try:
                    return _probe(client, url, options)
                except httpx.HTTPError as error:
                    problem = f"{url}: {error}"
            if time.monotonic() - began > options.start_timeout_s:
                raise EngineDead(f"no server of this model answers ({problem})")
            time.sleep(_PAUSE_S)


def _probe(client: httpx.Client, url: str, options: RemoteOptions) -> Found:
    models = _models(client, url)
    entry = _choose(models, options.model, url)
    name = str(entry["id"])
    kind: Kind = _OWNERS.get(str(entry.get("owned_by")), "openai") if options.kind == "auto" else options.kind
    card: dict[str, Any] = {}
    if kind == "enginehouse":
        answer = client.get(f"{url}/models/{name}")
        card = answer.json() if answer.status_code == 200 else {}
        if card.get("state") == "loading":
            raise httpx.TransportError("the model is still loading there")
    table = restricted(KINDS[kind], card.get("capabilities"), options)
    max_context = options.context or _context(card) or _context(entry) or _UNLIMITED
    reason = f"the server behind this model ({kind}) has no such thing"
    engine = engine_capabilities(table, card.get("capabilities"), reason)
    info = ModelInfo(
        backend="remote",
        max_context=max_context,
        vocab_size=_vocab_size(entry) or _UNLIMITED,
        engine=msgspec.structs.replace(engine, media=("image",) if options.images else ()),
        generation_defaults=_defaults(card),
        metadata=_metadata(card, entry, url, name, kind),
    )
    return Found(model=name, kind=table, info=info, tokenizes=kind == "enginehouse")


def _models(client: httpx.Client, url: str) -> list[dict[str, Any]]:
    answer = client.get(f"{url}/models")
    if answer.status_code in (401, 403):
        raise ModelLoadError(f"{url} does not take the API key of the settings (status {answer.status_code})")
    if answer.status_code >= 500 or answer.status_code == 429:
        raise httpx.TransportError(f"status {answer.status_code}")
    try:
        entries = answer.json()["data"]
        if answer.status_code == 200 and all(isinstance(entry["id"], str) for entry in entries):
            return cast(list[dict[str, Any]], entries)
    except (ValueError, KeyError, TypeError):
        pass
    raise ModelLoadError(
        f"{url}/models lists no models (status {answer.status_code}); is {url} an OpenAI-compatible API?"
    )


def _choose(models: Sequence[dict[str, Any]], wanted: str | None, url: str) -> dict[str, Any]:
    for entry in models:
        if wanted in (None, entry["id"], *(entry.get("aliases") or ())):
            return entry
    listed = ", ".join(repr(entry["id"]) for entry in models[:20]) or "none"
    if wanted is None:
        raise ModelLoadError(f"{url} serves no model")
    raise ModelLoadError(f"{url} serves no model {wanted!r}; it serves: {listed}")


def restricted(kind: KindOfServer, capabilities: Any, options: RemoteOptions) -> KindOfServer:
    """The kind as this very server is: what it says of itself, and what the settings say."""
    parameters, constraints = set(kind.parameters), kind.constraints
    if isinstance(capabilities, dict):
        refused = {name for name, said in capabilities.items() if said.get("support") == "refused"}
        # Fields of sampler plugins there, which this table cannot know; their capability names the plugin.
        plugins = {name for name, said in capabilities.items() if "by the plugin" in str(said.get("reason"))}
        parameters = (parameters | plugins) - refused
        constraints = tuple(one for field, kinds in _KIND_OF_FIELD.items() if field not in refused for one in kinds)
    parameters = (parameters | set(options.parameters)) - set(options.without)
    return evolve(kind, parameters=frozenset(parameters), constraints=constraints)


def engine_capabilities(kind: KindOfServer, said: Any, reason: str) -> EngineCapabilities:
    """What the engine says of each parameter; ``said`` is what the server says of itself, where it is one of ours."""
    reasons = {name: one.get("reason") for name, one in said.items()} if isinstance(said, dict) else {}
    return EngineCapabilities(
        takes_messages=True,
        native=tuple(sorted(kind.parameters)),
        refused={name: reasons.get(name) or reason for name in sorted(ALL_PARAMETERS - kind.parameters)},
        samplers=(),
        constraint_kinds=kind.constraints,
        constraint_problem=reason,
    )


def _context(entry: Mapping[str, Any]) -> int | None:
    """The context that a model object tells of, by one of its usual names."""
    meta = entry.get("meta")
    candidates = [entry.get(key) for key in _CONTEXT_KEYS]
    if isinstance(meta, dict):
        candidates += [meta.get("n_ctx"), meta.get("n_ctx_train")]
    return next((value for value in candidates if isinstance(value, int) and value > 1), None)


def _vocab_size(entry: Mapping[str, Any]) -> int | None:
    """The size of the vocabulary, where a server (llama-server) tells it."""
    meta = entry.get("meta")
    value = meta.get("n_vocab") if isinstance(meta, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _defaults(card: Mapping[str, Any]) -> dict[str, Any]:
    """What requests get there that give nothing: shown and sent as defaults, so that both servers say the same."""
    parameters = card.get("parameters")
    if not isinstance(parameters, dict):
        return {}
    return {
        name: one["value"]
        for name, one in parameters.items()
        if isinstance(one, dict) and one.get("origin") in _OF_MODEL and one.get("value") is not None
    }


def _metadata(card: Mapping[str, Any], entry: Mapping[str, Any], url: str, name: str, kind: Kind) -> dict[str, str]:
    own = card.get("metadata")
    known = {str(key): str(value) for key, value in own.items()} if isinstance(own, dict) else {}
    if isinstance(stamp := card.get("system_fingerprint"), str):
        known["remote_fingerprint"] = stamp
    return {**known, "remote_url": url, "remote_model": name, "remote_kind": kind}
