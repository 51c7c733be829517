"""Pages that plugins add to the server: a name and a folder of static files. Does not know how they are served."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen
from attrs.validators import matches_re

__all__ = ["Page"]


@frozen
class Page:
    """A page of a plugin, at ``/ui/<name>/``. It is a client of the public API like any other.

    Every file of the folder is served to everybody who reaches the server, without a key: HTML, JavaScript, CSS, SVG,
    PNG, JSON and text. Core's Content-Security-Policy allows scripts, styles and requests of this server only, neither
    inline scripts nor inline styles, and values for ``innerHTML`` and the like only from the Trusted Types policies
    ``lit-html`` and ``dompurify``.

    Attributes:
        name: part of the address; unique.
        folder: folder with ``index.html`` and the files that it loads by relative addresses. It is read at start; links
            and hidden files are left out.
        api_version: version of this class.
    """

    name: str = field(validator=matches_re(r"[a-z][a-z0-9_-]*"))
    folder: Path
    api_version: int = 1
