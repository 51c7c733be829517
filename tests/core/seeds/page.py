"""The examples of a page, and what runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from attrs import frozen

_PAGES = Path(__file__).parent / "pages"
_BASE_URL = re.compile(r"http://localhost:\d+")


@frozen
class Page:
    """One page, with a server that speaks its profile.

    Attributes:
        url: the server's; it takes the place of the one in the page's examples.
    """

    profile: str
    url: str

    def read(self, name: str) -> str:
        """A part of the page, word for word."""
        return (_PAGES / self.profile / name).read_text(encoding="utf-8")

    def run(self, name: str, replaced: dict[str, str] | None = None) -> str:
        """What an example prints; it must end well."""
        finished = self.try_run(name, replaced)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def try_run(self, name: str, replaced: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run an example; only its address is replaced, unless ``replaced`` says more."""
        text, num_urls = _BASE_URL.subn(self.url.replace("127.0.0.1", "localhost"), self.read(name))
        assert num_urls == 1
        for old, new in (replaced or {}).items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        program = [sys.executable, "-c"] if ".py" in name else ["bash", "-c"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
        return subprocess.run(
            [*program, text], capture_output=True, encoding="utf-8", env=env, timeout=110, check=False
        )


def shape(value: Any) -> Any:
    """Names and types without the values: lists by their first item."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__
