"""Makes the parts of docs/ that come from the source. Run it in the folder ``tests``: ``python -m project.pages``.

A test compares; a page that is out of date fails and names this command.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import re
import tempfile
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from enginehouse.api.metrics import FAMILIES
from enginehouse.contract import hookspecs
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.kinds import KINDS
from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse.settings.features import AdapterSettings, DrafterSettings, ExitPolicySettings
from enginehouse.settings.limits import ByteCount, MemoryBudget
from enginehouse.settings.profiles import PROFILES, Profile
from enginehouse_compress.options import CompressOptions
from enginehouse_compress.settings import CompressorSettings
from enginehouse_llguidance.formats import STRING_FORMATS
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_llguidance.schemas.keywords import KEYWORDS
from enginehouse_llguidance.schemas.numbers import NUMBER_FORMATS
from enginehouse_otel.options import OtelOptions
from enginehouse_pooling.embeddings import EmbeddingsBody
from enginehouse_pooling.inputs import PoolingBody
from enginehouse_pooling.rerank import RerankBody
from enginehouse_pooling.scores import ScoreBody
from enginehouse_testkit.plugin_skeleton import write_plugin

from .commands import command_pages
from .error_codes import code_table
from .parameters import parameter_table
from .plugin_objects import object_pages
from .repository import ROOT
from .sampling_fields import body_table, body_tables, field_table, step_table

__all__ = ["COMMAND", "TUTORIALS", "fill", "hook_names", "page_parts", "settings_tables"]

TUTORIALS = {
    "compressor": "compressor",
    "drafter": "drafter",
    "engine": "engine",
    "pooler": "pooler",
    "parser": "tool-parser",
    "router": "router",
    "sampler": "sampler",
    "surface": "surface",
}
"""Subject of a tutorial to the kind of plugin that it quotes."""

COMMAND = "cd tests && python -m project.pages"


@functools.cache
def page_parts() -> dict[str, dict[str, str]]:
    """Page to name of a generated part to its text."""
    return {
        "docs/api.md": {"parameters": parameter_table(), **body_tables()},
        **({"docs/commands.md": {"commands": command_pages()}} if find_spec("huggingface_hub") else {}),
        "docs/compression.md": {
            "settings": _table(CompressorSettings, set()),
            "options": _table(CompressOptions, set()),
        },
        "docs/configuration.md": {"settings": _settings()},
        "docs/embeddings.md": {
            "shared-fields": body_table(PoolingBody, with_inherited=True),
            "embeddings-fields": body_table(EmbeddingsBody, with_inherited=False),
            "rerank-fields": body_table(RerankBody, with_inherited=False),
            "score-fields": body_table(ScoreBody, with_inherited=False),
        },
        "docs/metrics.md": {"families": _families(), "otel": _table(OtelOptions, set())},
        "docs/plugin-hooks.md": {"hooks": _hooks()},
        "docs/plugin-objects.md": {"objects": object_pages()},
        "docs/plugin-testing.md": {"suites": _suites()},
        **{f"docs/tutorial-{subject}.md": _tutorial(kind) for subject, kind in TUTORIALS.items()},
        "docs/profiles.md": {"profiles": _profiles()},
        "docs/sampling.md": {"steps": step_table(), "fields": field_table()},
        "docs/structured.md": {
            "keywords": _keywords(),
            "formats": _formats(),
            "options": _table(LlguidanceOptions, set()),
        },
        "docs/troubleshooting.md": {"codes": code_table()},
    }


def fill(page: str, texts: dict[str, str]) -> str:
    """The page with its generated parts replaced."""
    for name, text in texts.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        head, rest = page.split(begin, 1)
        page = head + begin + text + end + rest.split(end, 1)[1]
    return page


def hook_names() -> list[str]:
    """Names of all hooks, in the order of hookspecs.py."""
    return [name for name, value in vars(hookspecs).items() if hasattr(value, "enginehouse_spec")]


def _plain(docstring: str) -> str:
    """One line of Markdown of reStructuredText."""
    return " ".join(_without_roles(docstring).split())


def _without_roles(docstring: str) -> str:
    """Markdown's code spans for those of reStructuredText, and for its roles."""
    return re.sub(r":\w+:`[~.]?([^`]+)`", r"`\1`", docstring.replace("``", "`"))


def settings_tables() -> list[tuple[str, type[Any]]]:
    """Name of each table of the configuration file and the class that reads it."""
    hints = get_type_hints(Settings)
    return [
        (f"{name}.<name>", get_args(kind)[1]) if get_origin(kind) is dict else (name, kind)
        for name, kind in hints.items()
        if name != "presets"
    ]


def _settings() -> str:
    tables = dict(settings_tables())
    text = ""
    for table, kind in tables.items():
        text += f"## `[{table}]`\n\n{_table(kind, {'options', 'folder', 'origin'})}\n"
        if kind is AuthSettings:
            text += f"## `[[auth.keys]]`\n\n{_table(KeySettings, set())}\n"
        if kind is ModelSettings:
            text += f"## `[models.<name>.adapters.<adapter>]`\n\n{_table(AdapterSettings, set())}\n"
    for name, backend in sorted(PluginRegistry.load(PluginsSettings()).backends.items()):
        text += f"## `[models.<name>]` with the backend `{name}`\n\n{_table(backend.options, {'context', 'slots'})}\n"
    return text


def _table(kind: type[Any], left_out: set[str]) -> str:
    """One row per attribute of a settings class."""
    attrs.resolve_types(kind)
    meanings = _attribute_docs(kind)
    shown = [attribute for attribute in attrs.fields(kind) if attribute.name not in left_out]
    columns = {
        "key": [f"`{attribute.name}`" for attribute in shown],
        "type": [_type(attribute.type) for attribute in shown],
        "default": [_default(attribute) for attribute in shown],
        "reload": [attribute.metadata["reload"] for attribute in shown if "reload" in attribute.metadata],
        "meaning": [meanings[attribute.name] for attribute in shown],
    }
    filled = {name: cells for name, cells in columns.items() if cells}
    lines = [tuple(filled), ("---",) * len(filled), *zip(*filled.values(), strict=True)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace(" --- ", "---")


def _attribute_docs(kind: type[Any]) -> dict[str, str]:
    """Attribute to what the class docstring says about it."""
    attributes = inspect.cleandoc(kind.__doc__ or "").split("Attributes:\n", 1)[1]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, flags=re.MULTILINE)
    return {name: _plain(text) for name, text in found}


def _default(attribute: attrs.Attribute[Any]) -> str:
    value = attribute.default
    if value is attrs.NOTHING:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value) or "empty"
    return f"`{value}`"


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if type(None) in get_args(kind):
        return _type(next(choice for choice in get_args(kind) if choice is not type(None)))
    if get_origin(kind) is tuple:
        (item, *_) = get_args(kind)
        if item is int:
            return "list of whole numbers"
        takes_tables = item is DrafterSettings or KeySettings in get_args(item)
        return "list of strings or tables" if takes_tables else "list of strings"
    if get_origin(kind) is dict:
        return "table"
    tables = ({kind: "table"} if attrs.has(kind) else {}) | {
        ByteCount: "bytes or text",
        Any: "string or table",
        ExitPolicySettings: "string or table",
        MemoryBudget: "bytes, text or table",
    }
    return tables.get(kind) or {int: "whole number", float: "number", str: "string", bool: "true or false"}[kind]


def _families() -> str:
    """One row per family of figures."""
    rows = [
        f"| `{item.shown_name}` | {item.kind} | {', '.join(f'`{label}`' for label in item.labels)} | {item.meaning} |\n"
        for item in FAMILIES
    ]
    return "".join(["| family | type | labels | meaning |\n", "|---|---|---|---|\n", *rows])


def _profiles() -> str:
    """One row per attribute of profiles, one column per profile."""
    names = list(PROFILES)
    rows = ["| | " + " | ".join(f"`{name}`" for name in names) + " |\n", "|---" * (len(names) + 1) + "|\n"]
    for attribute in attrs.fields(Profile):
        if attribute.name != "name":
            cells = [_cell(getattr(profile, attribute.name)) for profile in PROFILES.values()]
            rows.append(f"| `{attribute.name}` | {' | '.join(cells)} |\n")
    meanings = _attribute_docs(Profile)
    words = "".join(f"- `{name}`: {text}\n" for name, text in meanings.items() if name != "name")
    return f"{''.join(rows)}\n{words}"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"`{key}`: `{json.dumps(item)}`" for key, item in value.items()) or "-"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value) or "-"
    return "-" if value is None else f"`{value}`"


def _keywords() -> str:
    """One row per keyword of JSON Schema; annotations in one row."""
    annotations = ", ".join(
        f"`{name}`" for name, word in KEYWORDS.items() if word.status == "annotation" and not word.note
    )
    rows = [
        f"| `{name}` | {word.status} | {word.note} |\n"
        for name, word in sorted(KEYWORDS.items(), key=lambda item: ("enforced", "annotation").index(item[1].status))
        if word.status != "annotation" or word.note
    ]
    head = ["\n| keyword | | limits |\n", "|---|---|---|\n"]
    return "".join([*head, *rows, f"| {annotations} | annotation | |\n\n"])


def _formats() -> str:
    texts, numbers = (", ".join(f"`{name}`" for name in sorted(names)) for names in (STRING_FORMATS, NUMBER_FORMATS))
    neutral = "Others have no effect; unknown ones are listed as ignored."
    lines = textwrap.wrap(f"{texts}. Of numbers: {numbers}.", 128, break_on_hyphens=False)
    return "\n".join([*lines, neutral, ""])


def _hooks() -> str:
    """What all register hooks have in common, then each hook."""
    _, common = (inspect.getdoc(hookspecs) or "").split("\n\n", 1)
    parts = [f"### `{name}`\n\n{_as_markdown(inspect.getdoc(getattr(hookspecs, name)) or '')}" for name in hook_names()]
    return "\n\n".join([_as_markdown(common), *parts]) + "\n"


def _suites() -> str:
    """One row per contract suite: the hook whose objects it tests, its fixture, and the number of its tests."""
    kinds = {suite: kind for kind in KINDS.values() for suite in kind.suites}
    rows = ["| import from `enginehouse_testkit.` | suite | for | fixture | tests |\n", "|---|---|---|---|---|\n"]
    for path in sorted((ROOT / "core/enginehouse_testkit").glob("*_contract.py")):
        module = importlib.import_module(f"enginehouse_testkit.{path.stem}")
        (name,) = [name for name in module.__all__ if name.endswith("Contract")]
        suite = getattr(module, name)
        kind = kinds.get(f"{module.__name__}:{name}")
        subject = f"[`{kind.hook}`](plugin-hooks.md#{kind.hook})" if kind else "some runners"
        num_tests = sum(test.startswith("test_") for test in dir(suite))
        rows.append(f"| `{path.stem}` | `{name}` | {subject} | {_fixture(module.__doc__ or '')} | {num_tests} |\n")
    return "".join(rows)


def _fixture(docstring: str) -> str:
    """The fixture that the example of a suite defines, and its class attributes."""
    name = next(iter(re.findall(r"def (\w+)\(cls\)", docstring)), "see the docstring")
    settings = re.findall(r"^        (\w+) = ", docstring, flags=re.MULTILINE)
    shown = f"`{name}`" if name.isidentifier() else name
    return shown + (f"; {', '.join(f'`{one}`' for one in settings)}" if settings else "")


def _tutorial(kind: str) -> dict[str, str]:
    """The module and the tests that ``plugins new minimal --only KIND`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        write_plugin("minimal", Path(folder), kind)
        files = {"module": "enginehouse_minimal/__init__.py", "test": "tests/test_minimal.py"}
        return {
            name: f"```python\n{(Path(folder) / file).read_text(encoding='utf-8')}```\n" for name, file in files.items()
        }


def _as_markdown(docstring: str) -> str:
    """A Google docstring with ``code`` as Markdown."""
    text, _, example = _without_roles(docstring).partition("Example::\n\n")
    text = re.sub(
        r"^Returns:\n((?:    .*\n)+)",
        lambda found: f"Returns: {inspect.cleandoc(found[1])}\n",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^Args:\n", "Arguments:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^        +", "  ", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return text + (f"```python\n{inspect.cleandoc(example)}\n```" if example else "")


if __name__ == "__main__":
    logging.disable()  # errors are made here to be described
    for page, texts in page_parts().items():
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8"), texts), encoding="utf-8")
