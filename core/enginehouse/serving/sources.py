"""What a user wrote as a model's source -> where the model is.

Nothing is downloaded and nothing is opened here; only names and the file system are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import ModelLoadError
from enginehouse.plugins import plugin_border
from enginehouse.serving.hub.cache import cached_snapshot
from enginehouse.serving.hub.quantizations import choose_gguf
from enginehouse.serving.hub.reference import HubReference, parse_reference

__all__ = ["Offered", "find_source", "hub_reference", "no_such_model"]

Offered = Mapping[str, Callable[[], ModelSource | None]]


def find_source(text: str, offered: Offered) -> ModelSource:
    """Find the model that ``text`` means; ``path`` is None when nothing of that name is here.

    A name that a plugin offers wins over a file of the same name: ``./starter`` means the file. A text that is
    neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, the id of a downloaded model of a hub, or what only a
            backend understands. Behind a folder or an id, ``:Q4_K_M`` picks the GGUF file of that quantisation; behind
            an id, ``@v1.0`` (or ``:v1.0``) a revision.
        offered: the model sources of all plugins, by name.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed; or a folder holds several models
            and the text does not say which.
    """
    if text in offered:
        with plugin_border(f"the model source {text!r}"):
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


def hub_reference(text: str, offered: Offered) -> HubReference | None:
    """The hub's model that ``text`` means, downloaded or not; None where it means something else."""
    reference = None if text in offered else parse_reference(text)
    return None if reference is None or _is_path(text) else reference


def no_such_model(text: str, offered: Offered) -> ModelLoadError:
    """The error for a text that names no file and that no backend understands."""
    if hub_reference(text, offered) is not None:
        return ModelLoadError(
            f"there is no file or folder {text!r}; if it is the id of a model on the hub, it is not downloaded yet; "
            f"run: enginehouse pull {text} (or start the server with --pull)"
        )
    names = ", ".join(sorted(offered)) or "none are installed"
    return ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")


def _find_named(text: str) -> Path | None:
    """The model that a hub's id means, or a folder with a quantisation behind a colon."""
    name, colon, wanted = text.rpartition(":")
    if colon and (folder := Path(name).expanduser()).is_dir():
        return _inside(folder.absolute(), wanted, text)
    reference = parse_reference(text)
    if reference is None:
        return None
    snapshot = cached_snapshot(reference.model_id, reference.revision)
    return None if snapshot is None else _inside(snapshot, reference.quantization, text)


def _inside(path: Path, wanted: str | None, text: str) -> Path:
    """The model at ``path``: itself, or the GGUF file in a folder of such files."""
    if not path.is_dir() or (wanted is None and (path / "config.json").is_file()):
        return path
    file = choose_gguf(path, wanted, text)
    if file is None and wanted is not None:
        raise ModelLoadError(f"{text!r}: there are no GGUF files of which to pick {wanted!r}")
    return file or path


def _is_path(text: str) -> bool:
    """Whether ``text``, which looks like a hub's id, is rather meant as a path that is not there."""
    return Path(text.partition(":")[0]).expanduser().parent.exists()
