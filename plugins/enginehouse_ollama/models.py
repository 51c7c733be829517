"""``/api/tags``, ``/api/ps`` and ``/api/show``: the served models, with what clients read before they chat.

VS Code and GitHub Copilot read ``capabilities`` and, in ``model_info``, the architecture, the name and the context
length under a key that begins with the architecture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from enginehouse.contract.calls import Call, ModelEntry
from enginehouse.contract.surface import Chunk, Reply
from enginehouse_ollama.requests import OPTION_NAMES, known_name

__all__ = ["list_models", "list_running", "show_model"]

_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop")
"""Options among the parameters of ``/api/show``."""
_NEVER = timedelta(days=366 * 290)
"""Ollama's expiry of a model that is kept: about 290 years from now."""


async def list_models(call: Call) -> Reply:
    """``/api/tags``: all models that the caller may use."""
    return Reply({"models": [_listed(entry) for entry in call.server.models()]})


async def list_running(call: Call) -> Reply:
    """``/api/ps``: the loaded ones."""
    loaded = [entry for entry in call.server.models() if entry.state in ("ready", "draining")]
    return Reply({"models": [_running(entry) for entry in loaded]})


async def show_model(call: Call) -> Reply:
    """``/api/show``: one model. What is known only of a model that has been loaded is absent before."""
    entry = call.server.model(known_name(call, call.body.asked))
    info, architecture = entry.info, _architecture(entry)
    model_info: Chunk = {"general.architecture": architecture, "general.basename": entry.name}
    if info is not None:
        model_info[f"{architecture}.context_length"] = info.max_context
        model_info[f"{architecture}.vocab_size"] = info.vocab_size
        if (number := info.metadata.get("parameters", "")).isdigit():
            model_info["general.parameter_count"] = int(number)
    shown: Chunk = {
        "license": info.metadata.get("license", "") if info is not None else "",
        "modelfile": f"# Served by Enginehouse\nFROM {entry.name}\n",
        "parameters": _parameters(call, entry),
        "template": info.chat_templates.get("default", "") if info is not None else "",
        "details": _details(entry),
        "model_info": model_info,
        "capabilities": _capabilities(entry),
        "modified_at": _time(entry.created),
    }
    return Reply(shown)


def _listed(entry: ModelEntry) -> Chunk:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _time(entry.created),
        "size": entry.size_bytes or 0,
        "digest": _digest(entry),
        "details": _details(entry),
        "capabilities": _capabilities(entry),
    }


def _running(entry: ModelEntry) -> Chunk:
    kept = entry.is_pinned or entry.ttl_s is None
    left = _NEVER if kept else timedelta(seconds=max(0.0, (entry.ttl_s or 0.0) - (entry.idle_s or 0.0)))
    return {
        "name": entry.name,
        "model": entry.name,
        "size": entry.memory_bytes or 0,
        "digest": _digest(entry),
        "details": _details(entry),
        "expires_at": (datetime.now(UTC) + left).isoformat().replace("+00:00", "Z"),
        "size_vram": 0,
        "context_length": entry.info.max_context if entry.info is not None else 0,
    }


def _details(entry: ModelEntry) -> Chunk:
    architecture = _architecture(entry)
    metadata = entry.info.metadata if entry.info is not None else {}
    return {
        "parent_model": "",
        "format": "gguf" if entry.backend == "llamacpp" else entry.backend or "",
        "family": architecture,
        "families": [architecture],
        "parameter_size": _size(metadata),
        "quantization_level": entry.quantization or "",
    }


def _capabilities(entry: ModelEntry) -> list[str]:
    """Return Ollama's names of what a model can do; before its first load, that it completes texts."""
    if entry.info is not None and entry.info.task != "generate":
        return ["embedding"] if entry.info.task == "embed" else []
    found = ["completion"]
    if "tools" in entry.supports:
        found.append("tools")
    if "suffix" in entry.supports:
        found.append("insert")
    if entry.reasons:
        found.append("thinking")
    if entry.info is not None and "image" in entry.info.engine.media:
        found.append("vision")
    return found


def _architecture(entry: ModelEntry) -> str:
    metadata = entry.info.metadata if entry.info is not None else {}
    return metadata.get("architecture") or entry.backend or "unknown"


def _parameters(call: Call, entry: ModelEntry) -> str:
    """Return the default parameters as lines of a Modelfile."""
    lines = []
    for name, value in call.server.defaults(entry.name).items():
        option = OPTION_NAMES.get(name, name)
        for one in value if isinstance(value, tuple | list) else (value,):
            if option in _SHOWN and isinstance(one, int | float | str):
                lines.append(f"{option:<30} {json.dumps(one)}")
    return "\n".join(lines)


def _size(metadata: Mapping[str, str]) -> str:
    """Return the number of parameters as Ollama writes it, such as ``134.5M``; empty if it is not known."""
    number = float(metadata.get("parameters", "nan"))
    for unit, power in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= power:
            return f"{number / power:.1f}{unit}"
    return ""


def _digest(entry: ModelEntry) -> str:
    """Return 64 hexadecimal digits that change when the model does."""
    return hashlib.sha256(f"{entry.name}\0{entry.fingerprint}".encode()).hexdigest()


def _time(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
