"""What a user wrote as a model's source -> where the model is.

Nothing is downloaded and nothing is opened here; only names and the file system are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from enginehouse.backend import ModelSource
from enginehouse.errors import ModelLoadError

__all__ = ["Offered", "find_source", "no_such_model"]

# owner/name of a model hub, optionally with a revision or quantisation after a colon.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")

Offered = Mapping[str, Callable[[], ModelSource | None]]


def find_source(text: str, offered: Offered) -> ModelSource:
    """Find the model that ``text`` means; ``path`` is None when nothing of that name is here.

    A name that a plugin offers wins over a file of the same name: ``./starter`` means the file. A text that is
    neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, or what only a backend understands.
        offered: the model sources of all plugins, by name.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed.
    """
    if text in offered:
        source = offered[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    return ModelSource(text=text, path=path.absolute() if path.exists() else None)


def no_such_model(text: str, offered: Offered) -> ModelLoadError:
    """The error for a text that names no file and that no backend understands."""
    if _HUB_ID.fullmatch(text) and not Path(text).parent.exists():
        return ModelLoadError(
            f"there is no file or folder {text!r}; if it is a model hub's id: this version does not download models "
            "(`enginehouse pull` comes in a later one), so fetch it with the hub's own tool and give the path"
        )
    names = ", ".join(sorted(offered)) or "none are installed"
    return ModelLoadError(f"there is no file or folder {text!r}; named model sources: {names}")
