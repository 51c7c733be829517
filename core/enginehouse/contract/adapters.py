"""Adapters (LoRA): small weights that change a model for the sequences that name them.

A runner that can apply some implements :class:`AdapterKeeper` and says in ``capabilities.adapters`` how it mixes them.
Keys and values depend on the adapters that computed them, so an adapter is part of a sequence's identity: core never
shares a prefix across :data:`AdapterSet` values, and a sequence keeps its set from its first token to its last.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import msgspec

from enginehouse.contract.regular_files import open_regular

__all__ = ["Adapter", "AdapterKeeper", "AdapterMixing", "AdapterSet", "cache_key", "digest_of"]

AdapterMixing = Literal["none", "per_pass", "mixed"]
"""``none``: the runner takes no adapters. ``per_pass``: all spans of a forward pass have the same set. ``mixed``: each
span may have another one."""

AdapterSet = tuple[tuple[int, float], ...]
"""Handles of loaded adapters, each with its scale, which is not 0; empty is the base model."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as a request uses it.

    Attributes:
        name: name in the model's settings.
        path: the file, or the folder in PEFT's format; for an engine, the name that it knows.
        digest: hash of the files' bytes; "" if an engine loads them itself.
        scale: factor of the adapter's own strength; 1 is as trained.
    """

    name: str
    path: str
    digest: str = ""
    scale: float = 1.0


@runtime_checkable
class AdapterKeeper(Protocol):
    """A runner whose model can be changed by adapters, per span (``Span.adapter``).

    Calls:
        invocation_tokens: when a request with an adapter is queued whose tokens are not known; worker, engine thread;
            milliseconds.
        load_adapter: when an adapter is needed that is not loaded; worker, engine thread, between two passes;
            seconds.
        unload_adapter: when it is removed, or another one needs its place; worker, engine thread, between two
            passes; milliseconds.
    """

    def invocation_tokens(self, path: Path) -> tuple[int, ...]:
        """Return the token ids at whose last occurrence in the prompt an adapter begins to act; () if it always acts.

        Core gives spans before that place no adapter, so a runner need not know more of activated LoRA (aLoRA).

        Raises:
            AdapterRefused: the files are missing or damaged.

        Source: Greenewald et al., "Activated LoRA", arXiv 2504.12397, and peft's ``ALoraLinearVariant``.
        """

    def load_adapter(self, path: Path) -> int:
        """Load an adapter; return its handle, at least 1.

        Raises:
            AdapterRefused: the files are missing, damaged, of another kind or do not fit the model. Nothing has
                changed.
        """

    def unload_adapter(self, adapter: int) -> None:
        """Free an adapter that no open span will name again."""


_MAX_FILES = 64
_CHUNK_BYTES = 1 << 20


def digest_of(path: Path) -> str:
    """Return the hash of an adapter's files: a file, or the files of a folder in order of their names.

    Raises:
        OSError: a file cannot be read, or the path is neither a regular file nor a folder.
    """
    found = hashlib.sha256()
    files = sorted(file for file in path.iterdir() if file.is_file())[:_MAX_FILES] if path.is_dir() else [path]
    for file in files:
        with open_regular(file) as data:
            found.update(f"{file.name if path.is_dir() else ''}\0{os.fstat(data.fileno()).st_size}\0".encode())
            while chunk := data.read(_CHUNK_BYTES):
                found.update(chunk)
    return found.hexdigest()


_MARK = "\0\0adapters "


def cache_key(namespace: str, adapters: tuple[Adapter, ...]) -> str:
    """Return the namespace of the prefix cache for sequences with these adapters.

    No two sets of adapters have the same one for any text of the client: the part after the last mark decides.
    """
    if not adapters and _MARK not in namespace:
        return namespace
    uses = "+".join(f"{one.digest or one.path}@{one.scale!r}" for one in adapters)
    return f"{namespace}{_MARK}{uses.replace(chr(0), '')}"
