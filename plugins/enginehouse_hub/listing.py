"""Files of a repository at one commit, and the choice of those that a model needs. Does not know network or disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath
from typing import Any, Literal

from attrs import frozen
from huggingface_hub.hf_api import ModelInfo, RepoSibling

from enginehouse.contract.errors import DownloadError, ModelLoadError
from enginehouse.contract.gguf_names import choose_name, choose_projector, parts_of
from enginehouse_hub.reference import HubReference

__all__ = ["HubFile", "Listing", "needed_files", "read_listing"]

# Files that transformers and mlx-lm read in addition to the weights.
_SETTINGS = re.compile(r"[^/]+\.(?:json|jinja|txt|model|tiktoken)|additional_chat_templates/[^/]+\.jinja")
_OF_PICKLES = re.compile(r".*\.(?:bin|pt|pth)\.index\.json")
_CODE = re.compile(r"[^/]+\.py")
# If these exist, other safetensors duplicate the same weights (`consolidated`, `model.fp16`) or are adapters.
_WEIGHTS = re.compile(r"model(?:-\d+-of-\d+)?\.safetensors")


@frozen
class HubFile:
    """A file of a repository.

    Attributes:
        path: path in the repository, with slashes.
        digest: digest of its content; also the name of the content in the cache.
        digest_of: kind of digest: ``sha256`` for large files, else ``git``'s SHA-1 of a blob.
    """

    path: str
    num_bytes: int
    digest: str
    digest_of: Literal["sha256", "git"]


@frozen
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]


def read_listing(data: Any, endpoint: str) -> Listing:
    """Parse the hub's description of a repository. Paths that lead outside the cache are refused.

    Raises:
        DownloadError: the description is not valid.
    """
    try:
        info = ModelInfo(id="", sha=data["sha"], siblings=data["siblings"])
        if info.sha is None or not re.fullmatch(r"[0-9a-f]{40,64}", info.sha):
            raise ValueError(f"no commit: {info.sha!r}")
        return Listing(info.sha, tuple(_read_file(entry) for entry in info.siblings or ()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DownloadError(f"{endpoint} does not describe a repository as a model hub does: {error}") from error


def needed_files(reference: HubReference, listing: Listing, *, code: bool = False) -> list[HubFile]:
    """Return the files that serving needs: one GGUF file with its parts and its projector of images, or safetensors
    with tokenizer and settings.

    Args:
        code: include the repository's Python files, for models that run their own code.

    Raises:
        DownloadError: the repository holds nothing that can be served, or several models and none was named.
    """
    by_path = {file.path: file for file in listing.files}
    safetensors = [file for file in listing.files if _is_weights(file.path)]
    if reference.quantization is not None or not safetensors:
        return _gguf_files(reference, by_path)
    if "config.json" not in by_path:
        raise DownloadError(f"{reference.model_id} holds no language model: there are weights, but no config.json")
    chosen = [file for file in safetensors if _WEIGHTS.fullmatch(file.path)] or safetensors
    whole = [file for file in chosen if file.path == "model.safetensors"]
    settings = [file for file in listing.files if _is_setting(file.path) or (code and _CODE.fullmatch(file.path))]
    return settings + (whole or chosen)


def _gguf_files(reference: HubReference, by_path: dict[str, HubFile]) -> list[HubFile]:
    try:
        first = choose_name((PurePosixPath(path) for path in by_path), reference.quantization, str(reference))
    except ModelLoadError as error:
        raise DownloadError(error.message) from error
    if first is None:
        raise DownloadError(f"{reference.model_id} {_why_nothing(reference, list(by_path))}")
    parts = [str(part) for part in parts_of(first)]
    missing = [part for part in parts if part not in by_path]
    if missing:
        raise DownloadError(f"{reference.model_id} lacks a part of its model: {missing[0]}")
    return [by_path[path] for path in (*parts, *_projector_files(first, by_path))]


def _projector_files(model: PurePath, by_path: dict[str, HubFile]) -> list[str]:
    """Return the projector of images of a model, if it has one; none if several may be meant."""
    try:
        projector = choose_projector(model, [PurePosixPath(path) for path in by_path])
    except ModelLoadError:
        return []
    return [str(projector)] if projector is not None else []


def _why_nothing(reference: HubReference, paths: Sequence[str]) -> str:
    if reference.quantization is not None:
        return f"holds no GGUF files of which to pick {reference.quantization}"
    pickles = [path for path in paths if path.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return (
            f"holds its weights as pickles only ({pickles[0]}), which run code when they are loaded; "
            "it needs safetensors or GGUF files"
        )
    return "holds neither safetensors nor GGUF files"


def _is_weights(path: str) -> bool:
    """True for safetensors of the model itself; folders hold other formats of it, adapters are other models."""
    name = PurePosixPath(path).name
    return path == name and path.endswith(".safetensors") and not name.startswith(("adapter", "consolidated"))


def _is_setting(path: str) -> bool:
    return _SETTINGS.fullmatch(path) is not None and not _OF_PICKLES.fullmatch(path)


def _read_file(entry: RepoSibling) -> HubFile:
    path = entry.rfilename
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or any(sign in path for sign in "\\:\0"):
        raise ValueError(f"a path that leads elsewhere: {path!r}")
    digest, num_bytes, length = entry.blob_id, entry.size, 40
    if entry.lfs is not None:
        digest, num_bytes, length = entry.lfs.sha256, entry.lfs.size, 64
    if digest is None or not re.fullmatch(rf"[0-9a-f]{{{length}}}", digest):
        raise ValueError(f"no digest: {digest!r}")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"no size: {num_bytes!r}")
    return HubFile(path, num_bytes, digest, "git" if entry.lfs is None else "sha256")
