"""Models that administrators add to a running server: which sources their requests may name.

A request never selects a file outside ``server.models_dir``: other paths are refused whether they exist or not. Ids of
a hub, and names that plugins offer, must match ``server.allowed_sources``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from enginehouse.contract.errors import InvalidRequest, SourceNotAllowed, SourceNotFound, quoted
from enginehouse.contract.gguf_names import stem_of
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.sources import hub_of
from enginehouse.settings.config import ModelSettings, Settings, matches

_MAX_CHARS = 1000


def allowed_source(text: str, settings: Settings, registry: PluginRegistry) -> str:
    """Return the source that ``text``, sent by an administrator, names: a path in a folder of models, or ``text``.

    Reads the disk.

    Args:
        text: a path relative to a folder of models, or an absolute one in it, optionally with ``:Q4_K_M``; the id of a
            model of a hub; or a name that a plugin offers.

    Raises:
        InvalidRequest: it cannot be a source.
        SourceNotAllowed: it is outside the folders, or does not match the patterns.
        SourceNotFound: it is in a folder, but nothing is there.
    """
    if not text or len(text) > _MAX_CHARS or not text.isprintable():
        raise InvalidRequest(f"source: must be 1 to {_MAX_CHARS} printable characters, not {quoted(text)}", "source")
    inside = list(_in_folders(text, settings))
    for path in inside:
        if _exists(path):
            return path
    is_id = text in registry.model_sources or hub_of(text, registry) is not None
    if is_id and _is_allowed(text, settings.server.allowed_sources):
        if _exists(text):  # a source that is a path takes precedence over an id, here in the working folder
            raise SourceNotAllowed(
                f"source: {quoted(text)} is also a path, which is not in server.models_dir", "source"
            )
        return text
    if inside and not is_id:
        raise SourceNotFound(f"source: no file or folder {quoted(text)} is in server.models_dir", "source")
    raise SourceNotAllowed(
        f"source: {quoted(text)} is neither in server.models_dir nor allowed by server.allowed_sources", "source"
    )


def name_of(source: str) -> str:
    """Return the name of a model that is added without one: its id, or its file or folder without the suffix."""
    path = Path(source)
    return stem_of(path) if path.suffix.lower() == ".gguf" else source if not path.is_absolute() else path.name


def check_name(name: str, model: ModelSettings) -> None:
    """Check that names are printable, since they appear in headers and log lines, and that they are not patterns.

    Raises:
        InvalidRequest: names the field.
    """
    for param, known in (("id", name), *(("aliases", alias) for alias in model.aliases)):
        if not known.strip() or not known.isprintable() or (param == "id" and "*" in known):
            raise InvalidRequest(
                f"{param}: must hold characters that can be printed, and no *, not {quoted(known)}", param
            )


def _in_folders(text: str, settings: Settings) -> Iterator[str]:
    """Yield the paths that ``text`` means in the folders of models, whether they exist or not; links are followed."""
    for folder in settings.server.models_dir:
        root = Path(folder).resolve()
        try:
            meant = [(root / name).resolve() for name in (text, text.rpartition(":")[0]) if name]
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long
            continue
        if all(path != root and path.is_relative_to(root) for path in meant):
            yield str(Path(folder, text))


def _exists(path: str) -> bool:
    """True if a file or folder is there, or one with a quantisation after it."""
    try:
        return Path(path).exists() or Path(path.rpartition(":")[0] or path).is_dir()
    except (OSError, ValueError):
        return False


def _is_allowed(text: str, patterns: tuple[str, ...]) -> bool:
    """True if an id, or the same without quantisation and revision, is one of the patterns or matches one."""
    names = (text, text.partition("@")[0].partition(":")[0])
    return any(pattern == name or matches(pattern, name) for pattern in patterns for name in names)
