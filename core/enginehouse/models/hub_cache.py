"""Models that the Hugging Face hub's own tools have downloaded: id -> folder. Nothing is downloaded here.

The folders are those of ``huggingface_hub``: ``models--<owner>--<name>/snapshots/<revision>``, with the revision that
a branch or tag stands for in ``refs/<name>``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cached_snapshot", "hub_folder"]

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def hub_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept, by the variables that the hub's tools read."""
    if folder := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def cached_snapshot(model_id: str, revision: str = "main", env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of a downloaded model; None when it, or this revision of it, is not there.

    Args:
        revision: a branch, a tag, or a commit.
    """
    if not _ID.fullmatch(model_id) or not re.fullmatch(r"[\w.-]+", revision) or ".." in revision:
        return None
    folder = hub_folder(env) / f"models--{model_id.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
