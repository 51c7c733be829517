"""Models in folders (``server.models_dir``): finds them, names them, and says what cannot be served and why.

Reads names and the first bytes of files, never weights. Understands folders as llama-server (``model.gguf``,
``model/part-00001-of-00003.gguf``), LM Studio (``publisher/model/file.gguf``), oMLX (``model/config.json`` or
``publisher/model/config.json``) and the cache of the Hugging Face hub (``models--owner--name``) have them. Knows no
backend: which one opens a model, if any, is decided when it is planned.
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from enginehouse.contract.gguf_names import is_beside, part_number, parts_of, quantization_of, stem_of
from enginehouse.contract.regular_files import read_regular_text

__all__ = ["FoundModel", "Scan", "Unserved", "scan_folders"]

_MAX_DEPTH = 2
_MAX_ENTRIES = 100_000
_MAX_JSON_BYTES = 16 * 2**20
_MAX_REVISION_BYTES = 1024
_MIN_GGUF_BYTES = 24  # magic, version, number of tensors, number of metadata entries
_HUB = "models--"


@frozen(kw_only=True)
class Unserved:
    """A file or folder that looks like a model but is not served, with the reason."""

    path: str
    reason: str


@frozen(kw_only=True)
class FoundModel:
    """A model in a folder.

    Attributes:
        name: the name by which it is served.
        path: a GGUF file (the first part of a split one) or a model folder.
        aliases: further names, such as ``publisher/model``.
        files: its weights.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@frozen(kw_only=True)
class Scan:
    """The content of the folders. Every file with weights is in at most one entry."""

    models: tuple[FoundModel, ...] = ()
    unserved: tuple[Unserved, ...] = ()


class _Bad(Exception):
    """A file or folder that is not a usable model; the text is the reason."""


def scan_folders(folders: Iterable[Path], taken: Collection[str] = ()) -> Scan:
    """Return the models in folders and two levels of folders in them. Never raises because of their content.

    Args:
        folders: the folders; one that cannot be read is listed as not served.
        taken: names that other models have.
    """
    walk = _Walk()
    for folder in folders:
        walk.enter(_Place(folder), is_root=True)
    return _named(walk.found, walk.unserved, taken)


@frozen
class _Place:
    """A folder on the way.

    Attributes:
        names: the names of the folders between the scanned one and this one, inclusive; of a repository of the hub
            its id.
        is_inner: True for a folder in a repository of the hub, which does not name a model of its own.
    """

    path: Path
    names: tuple[str, ...] = ()
    depth: int = 0
    is_hub: bool = False
    is_inner: bool = False

    def below(self, name: str) -> _Place:
        names = self.names if self.is_hub else (*self.names, name)
        return _Place(self.path / name, names, self.depth + 1, self.is_hub, self.is_hub)


@frozen(eq=False)
class _Walk:
    """One scan: what was found so far, and the real paths of all weights, each of which is served once."""

    found: list[FoundModel] = field(factory=list)
    unserved: list[Unserved] = field(factory=list)
    seen: dict[str, Path] = field(factory=dict)
    num_entries: list[int] = field(factory=lambda: [0])

    def enter(self, place: _Place, *, is_root: bool = False) -> None:
        """Scan a folder, and those in it."""
        try:
            entries = self._list(place.path)
        except (OSError, ValueError) as error:
            self.refuse(place.path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
            return
        except _Bad as error:
            self.refuse(place.path, str(error))
            return
        files = [entry.name for entry in entries if _is_file(entry)]
        is_model = self._take_folder(place, files)
        self._take_ggufs(place, [name for name in files if name.lower().endswith(".gguf")])
        for entry in entries if not is_model else ():
            if not entry.name.startswith(".") and _is_folder(entry):
                if entry.name.startswith(_HUB) and place.depth == 0:
                    self._enter_hub(place.path / entry.name)
                elif place.depth < _MAX_DEPTH:
                    self.enter(place.below(entry.name))

    def refuse(self, path: Path, reason: str) -> None:
        self.unserved.append(Unserved(path=_shown(path), reason=reason))

    def _list(self, folder: Path) -> list[os.DirEntry[str]]:
        with os.scandir(folder) as scanned:
            entries = []
            for entry in scanned:
                self.num_entries[0] += 1
                if self.num_entries[0] > _MAX_ENTRIES:
                    raise _Bad(f"more than {_MAX_ENTRIES} files and folders; name a folder that holds models only")
                entries.append(entry)
        return sorted(entries, key=lambda entry: entry.name)

    def _enter_hub(self, folder: Path) -> None:
        """Scan the current snapshot of a repository in the hub's cache."""
        name = folder.name.removeprefix(_HUB).replace("--", "/")
        try:
            commit = read_regular_text(folder / "refs" / "main", _MAX_REVISION_BYTES).strip()
        except (OSError, ValueError):
            commit = ""
        snapshot = folder / "snapshots" / commit
        if not commit or "/" in commit or commit.startswith(".") or not snapshot.is_dir():
            self.refuse(folder, "the revision 'main' of this repository is not in the cache completely")
            return
        self.enter(_Place(snapshot, (name,), _MAX_DEPTH - 1, is_hub=True))

    # -- folders of safetensors --------------------------------------------------------------------

    def _take_folder(self, place: _Place, files: Sequence[str]) -> bool:
        """Take a folder that is itself a model; True if it is one, usable or not."""
        weights = [name for name in files if name.endswith(".safetensors")]
        if not weights:
            if "config.json" in files and any(name.endswith((".bin", ".pt", ".pth")) for name in files):
                self.refuse(place.path, "its weights are pickled (.bin, .pt), which could run code; use safetensors")
                return True
            return False
        try:
            if "adapter_config.json" in files and "config.json" not in files:
                raise _Bad("a LoRA adapter, not a model; name it in the settings of its base model")
            if "config.json" not in files:
                raise _Bad("safetensors without a config.json, so the architecture is not known")
            _check_folder(place.path, weights)
            self._take(place, place.path, [place.path / name for name in weights])
        except _Bad as error:
            self.refuse(place.path, str(error))
        return True

    # -- GGUF files --------------------------------------------------------------------------------

    def _take_ggufs(self, place: _Place, files: Sequence[str]) -> None:
        """Take the GGUF files of a folder, with all parts of a split one as one model."""
        grouped = set[str]()
        usable: list[tuple[Path, list[Path]]] = []
        for name in files:  # sorted, so that the first part of a model comes before the others
            if name in grouped:
                continue
            try:
                parts = _parts(name)
                grouped.update(parts)
                _check_parts(place.path, parts, files)
            except _Bad as error:
                self.refuse(place.path / name, str(error))
            else:
                usable.append((place.path / name, [place.path / part for part in parts]))
        kinds = Counter(quantization_of(path) for path, _ in usable)
        for path, paths in usable:
            kind = quantization_of(path)
            if len(usable) == 1 and not place.is_inner:
                suffix: str | None = ""
            else:
                suffix = f":{kind}" if kind and kinds[kind] == 1 else None
            self._take(place, path, paths, suffix)

    def _take(self, place: _Place, path: Path, files: Sequence[Path], suffix: str | None = "") -> None:
        """Add a model, named by its folder if that holds no other one, else by its quantisation or file.

        Args:
            suffix: appended to the folder's name; None if the folder's name does not tell it from others.
        """
        real = os.path.realpath(path)
        if real in self.seen:
            self.refuse(path, f"the same file as {_shown(self.seen[real])}")
            return
        for file in files:
            self.seen[os.path.realpath(file)] = path
        self.seen[real] = path
        names = place.names or ((place.path.name,) if path == place.path else ())
        if not names or suffix is None:
            name, aliases = stem_of(path), tuple[str, ...]()
        else:
            name = names[-1] + suffix
            aliases = ("/".join(names) + suffix,) if len(names) > 1 else ()
        self.found.append(FoundModel(name=name, path=path, aliases=aliases, files=tuple(files)))


def _parts(name: str) -> list[str]:
    """Return the names of all parts of the model whose first file is ``name``."""
    if is_beside(Path(name)):
        raise _Bad("not a model by itself: a projector of images, an importance matrix or a vocabulary")
    if part_number(Path(name)) != 1:
        raise _Bad("a part of a split model whose first part is missing")
    return [part.name for part in parts_of(Path(name))] or [name]


def _check_parts(folder: Path, parts: Sequence[str], files: Sequence[str]) -> None:
    present = set(files)
    if missing := [part for part in parts if part not in present]:
        raise _Bad(f"{len(missing)} of its {len(parts)} parts are missing, the first is {missing[0]}")
    for part in parts:
        _check_gguf(folder / part)


def _check_gguf(path: Path) -> None:
    head, num_bytes = _head(path)
    if head[:4] != b"GGUF":
        raise _Bad("not a GGUF file: it does not begin with 'GGUF'")
    if num_bytes < _MIN_GGUF_BYTES:
        raise _Bad(f"not a complete GGUF file: it has {num_bytes} bytes")


def _head(path: Path) -> tuple[bytes, int]:
    """Return the first 8 bytes of a file and its size."""
    try:
        with path.open("rb") as file:
            return file.read(8), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _Bad(f"{path.name} cannot be read: {error.strerror or error}") from error


def _check_folder(folder: Path, weights: Sequence[str]) -> None:
    """Check that a folder of safetensors is complete, as far as names and headers say."""
    _read_object(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _read_object(index).get("weight_map")
        files = {name for name in named.values() if isinstance(name, str)} if isinstance(named, dict) else set()
        if missing := sorted(files.difference(weights)):
            raise _Bad(f"{len(missing)} of its {len(files)} files of weights are missing, the first is {missing[0]}")
    for name in weights:
        _check_safetensors(folder / name)


def _check_safetensors(path: Path) -> None:
    head, num_bytes = _head(path)
    if len(head) < 8 or struct.unpack("<Q", head)[0] > num_bytes - 8:
        raise _Bad(f"{path.name} is not a complete file of safetensors: it has {num_bytes} bytes")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
        data = json.loads(text) if len(text) <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise _Bad(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise _Bad(f"{path.name} does not hold a JSON object")
    return data


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _shown(path: Path) -> str:
    """Return a path as text that can be encoded, for a name of any bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _named(found: Sequence[FoundModel], unserved: Sequence[Unserved], taken: Collection[str]) -> Scan:
    """Give each model a name of its own: publishers distinguish models of one name, else the first keeps it."""
    counts = Counter(model.name for model in found)
    models: list[FoundModel] = []
    refused = list(unserved)
    names = dict.fromkeys(taken, "a model of the settings")
    for model in _by_publisher(found, counts):
        if not model.name.strip() or not model.name.isprintable() or "*" in model.name:
            refused.append(
                Unserved(path=_shown(model.path), reason="its name holds characters that a name cannot have")
            )
        elif model.name in names:
            reason = f"the name {model.name!r} is taken by {names[model.name]}"
            refused.append(Unserved(path=_shown(model.path), reason=reason))
        else:
            names[model.name] = _shown(model.path)
            models.append(model)
    known = Counter(alias for model in models for alias in model.aliases)
    free = [
        evolve(model, aliases=tuple(one for one in model.aliases if one not in names and known[one] == 1))
        for model in models
    ]
    return Scan(models=tuple(free), unserved=tuple(refused))


def _by_publisher(found: Iterable[FoundModel], counts: Counter[str]) -> Iterator[FoundModel]:
    for model in found:
        if counts[model.name] > 1 and model.aliases:
            yield evolve(model, name=model.aliases[0], aliases=())
        else:
            yield model
