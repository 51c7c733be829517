"""The documentation site: the README, the pages of this folder and a reference of the contract. Build: `tox -e docs`.

The pages are plain Markdown, which a code host shows as well. The first page is the README, whose list of pages becomes
the table of contents.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.metadata import version as installed_version
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent
_CORE = _ROOT / "core" / "enginehouse"
# The folder of npm's package `mermaid`; without it, diagrams are shown as their source.
_MERMAID = Path(os.environ.get("MERMAID", "none"), "dist")

project = "Enginehouse"
copyright = "the authors of Enginehouse"
version = release = installed_version("enginehouse")
extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["deploy", "reference/modules.rst", "reference/enginehouse.rst"]
nitpicky = True
# The site is built without a network: names of other projects have no link.
nitpick_ignore_regex = [
    ("py:.*", r"(attrs|collections|contextlib|datetime|io|msgspec|np|numpy|os|pathlib|pluggy)\..*"),
    ("py:.*", r"NDArray|_F"),
]

# Anchors of headings as a code host forms them. Generated parts begin at a level of their own.
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]

# The reference: one page for each module that plugin authors import.
apidoc_modules = [
    {
        "path": _CORE,
        "destination": "reference",
        "exclude_patterns": [str(path) for path in _CORE.iterdir() if path.name not in ("contract", "__init__.py")],
        "separate_modules": True,
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
]
autodoc_default_options = {"ignore-module-all": True, "exclude-members": "__init__"}
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
default_role = "code"
napoleon_custom_sections = [("Calls", "params_style")]
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Enginehouse"
if _MERMAID.exists():
    extensions.append("sphinxcontrib.mermaid")
    myst_fence_as_directive = ["mermaid"]
    mermaid_fullscreen = False
    mermaid_use_local = "mermaid/mermaid.esm.min.mjs"  # below _static


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the README the first page; links to files outside of this folder become downloads."""
    if page == "index":
        before, after = (_ROOT / "README.md").read_text(encoding="utf-8").split("\n## Documentation\n")
        pages, after = after.split("\n## ", 1)
        source[0] = _inside(f"{before}\n## {after}") + "\n".join(map(_contents, pages.split("\n- ")[1:]))
    source[0] = source[0].replace("](../README.md", "](index.md")
    source[0] = re.sub(r"\[([^]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", r"{download}`\1 <\2>`", source[0])


def _inside(readme: str) -> str:
    """Text of the README with its links as seen from this folder."""
    readme = re.sub(r"\]\((?!docs/|#|\w+://)", "](../", readme)
    return readme.replace("](docs/", "](")


def _contents(group: str) -> str:
    """Table of contents of a group in the README's list: `Caption: [title](docs/page.md), ...`."""
    rows = re.findall(r"\[([^]]*)\]\(docs/(\S+)\.md\)", group)
    caption = group.partition(":")[0]
    if caption == "Reference":
        rows.append(("Python contract", "reference/enginehouse.contract"))
    entries = "\n".join(f"{title[:1].upper()}{title[1:]} <{page}>" for title, page in rows)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _keep_colons(app: Sphinx, what: str, name: str, value: object, *rest: list[str]) -> None:
    """Napoleon takes the text before a colon in the first line of a variable's docstring for its type."""
    if what in ("attribute", "data", "property"):
        rest[-1][:0] = ["..", ""]  # an empty comment


def _leave_out_object(app: Sphinx, name: str, value: object, options: object, bases: list[type]) -> None:
    """A class that inherits nothing has no line about it."""
    bases[:] = [base for base in bases if base is not object]


def _copy_mermaid(app: Sphinx, error: Exception | None) -> None:
    if _MERMAID.exists() and error is None:
        for name in ("mermaid.esm.min.mjs", "chunks/mermaid.esm.min"):
            source, target = _MERMAID / name, Path(app.outdir, "_static", "mermaid", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.map"), dirs_exist_ok=True)
            else:
                shutil.copy(source, target)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)
    app.connect("autodoc-process-bases", _leave_out_object)
    app.connect("build-finished", _copy_mermaid)
