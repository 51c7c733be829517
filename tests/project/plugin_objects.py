"""The page docs/plugin-objects.md, from the modules of the contract: every class that an author implements or gets.

What a class docstring says in ``Attributes:`` and ``Calls:`` becomes tables. A line of ``Calls:`` has three parts: when
a method is called, where (process and thread), and how long it may take.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from attrs import frozen

from enginehouse.contract import (
    backend,
    calls,
    commands,
    composition,
    compressor,
    drafter,
    engine,
    exit_policy,
    identity,
    logits_processor,
    model_hub,
    page,
    parsers,
    pooler,
    preparer,
    router,
    sampler,
    server_events,
    structured,
    surface,
    types,
)
from enginehouse.plugins.kinds import KINDS

__all__ = ["SECTIONS", "classes_of", "object_pages", "section_of"]

SECTIONS: tuple[tuple[str, ModuleType], ...] = (
    ("Backends", backend),
    ("Poolers", pooler),
    ("Engines", engine),
    ("Samplers", sampler),
    ("Logits processors", logits_processor),
    ("Structured decoders", structured),
    ("Drafters", drafter),
    ("Exit policies", exit_policy),
    ("Parsers", parsers),
    ("Composition parts", composition),
    ("Routers", router),
    ("Compressors", compressor),
    ("Preparers", preparer),
    ("Surfaces", surface),
    ("Calls of surfaces", calls),
    ("Authenticators", identity),
    ("Listeners", server_events),
    ("Model hubs", model_hub),
    ("Commands", commands),
    ("Pages", page),
    ("Requests, prompts and events", types),
)
"""Heading and module of each section, in the order of the page."""

_SHARED = (calls, composition, engine, types)
"""Modules whose values several kinds share, or core provides."""

_OTHERS = {"authenticators": identity, "listeners": server_events, "model_sources": backend}
"""Kinds whose objects are functions: the module with their arguments and results."""


@frozen
class ContractClass:
    """A class of the contract, as its source says.

    Attributes:
        attributes: name, type and meaning.
        methods: signature and docstring.
        calls: method to when, where and how long.
    """

    name: str
    text: str
    is_protocol: bool
    attributes: tuple[tuple[str, str, str], ...]
    methods: tuple[tuple[str, str], ...]
    calls: dict[str, tuple[str, ...]]

    @property
    def is_of_core(self) -> bool:
        """True if core provides its objects."""
        return "provided by core" in self.text.casefold()


def section_of(kind: str) -> ModuleType:
    """The module of the contract that describes the objects of a kind."""
    module = inspect.getmodule(KINDS[kind].protocol)
    known = [one for _, one in SECTIONS if one is module]
    return _OTHERS[kind] if kind in _OTHERS else known[0]


def object_pages() -> str:
    """The generated part of the page: a list of the sections, then each of them."""
    listed = "".join(f"- [{title}](#{_anchor(title)}): {_hooks(module)}\n" for title, module in SECTIONS)
    return f"{listed}\n" + "\n".join(_section(title, module) for title, module in SECTIONS)


def classes_of(module: ModuleType) -> list[ContractClass]:
    """The classes that a module exports: protocols first."""
    names = module.__all__
    found = [_read(node) for node in _nodes(module) if isinstance(node, ast.ClassDef) and node.name in names]
    return sorted(found, key=lambda one: not one.is_protocol)


def _hooks(module: ModuleType) -> str:
    hooks = [kind.hook for kind in KINDS.values() if section_of(kind.name) is module]
    return ", ".join(f"[`{hook}`](plugin-hooks.md#{hook})" for hook in hooks) or "objects without a hook"


def _section(title: str, module: ModuleType) -> str:
    about = _markdown(inspect.getdoc(module) or "")
    parts = [f"## {title}\n\nModule `{module.__name__}`. Registered by {_hooks(module)}.\n\n{about}\n"]
    if module in _SHARED:
        parts = [f"## {title}\n\nModule `{module.__name__}`.\n\n{about}\n"]
    parts += map(_class, classes_of(module))
    values = [*_values(module)]
    parts += [f"### Values\n\n| name | meaning |\n|---|---|\n{''.join(values)}"] if values else []
    return "\n".join(parts)


def _class(one: ContractClass) -> str:
    lines = [f"### `{one.name}`\n\n{_markdown(one.text)}\n"]
    if one.attributes:
        rows = [f"| `{name}` | {_cell(f'`{kind}`')} | {_cell(text)} |\n" for name, kind, text in one.attributes]
        lines.append(f"| attribute | type | meaning |\n|---|---|---|\n{''.join(rows)}")
    if one.calls:
        rows = [f"| `{name}` | {' | '.join(map(_cell, parts))} |\n" for name, parts in one.calls.items()]
        lines.append(f"| method | called | by | may take |\n|---|---|---|---|\n{''.join(rows)}")
    for signature, docstring in one.methods:
        lines.append(f"**`{signature}`**\n\n{_markdown(docstring)}\n")
    return "\n".join(lines)


def _read(node: ast.ClassDef) -> ContractClass:
    docstring = ast.get_docstring(node) or ""
    text, sections = _split(docstring)
    meanings = {name: _plain(meaning) for name, meaning in _entries(sections.get("Attributes", "")).items()}
    attributes, methods = [], []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            name, kind = item.target.id, ast.unparse(item.annotation)
            attributes.append((name, kind + _default(item.value), meanings.get(name, "")))
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("__attrs"):
            if any(isinstance(one, ast.Name) and one.id == "property" for one in item.decorator_list):
                kind = ast.unparse(item.returns) if item.returns is not None else "Any"
                attributes.append((item.name, f"{kind} (property)", _plain(ast.get_docstring(item) or "")))
            else:
                methods.append((_signature(item), ast.get_docstring(item) or ""))
    calls = {
        name: tuple(_plain(line).rstrip(".").split("; ")) for name, line in _entries(sections.get("Calls", "")).items()
    }
    bases = " ".join(ast.unparse(base) for base in node.bases)
    return ContractClass(node.name, text, "Protocol" in bases, tuple(attributes), tuple(methods), calls)


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    text = ast.unparse(value)
    found = re.match(r"field\((?:.*?)default=([^,)]+)", text)
    if text.startswith("field("):
        return f" = {found[1]}" if found else " = empty" if "factory=" in text else ""
    return f" = {text}"


def _signature(item: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(item.args).removeprefix("self").removeprefix(", ")
    returns = f" -> {ast.unparse(item.returns)}" if item.returns is not None else ""
    return f"{'async ' if isinstance(item, ast.AsyncFunctionDef) else ''}{item.name}({arguments}){returns}"


def _split(docstring: str) -> tuple[str, dict[str, str]]:
    """The text without the sections of attributes and calls, and these sections."""
    sections: dict[str, str] = {}
    for name in ("Attributes", "Calls"):
        found = re.search(rf"^{name}:\n((?:    .*(?:\n|$)|\n)+)", docstring, flags=re.MULTILINE)
        if found:
            sections[name] = found[1]
            docstring = docstring.replace(found[0], "")
    return docstring.strip(), sections


def _entries(section: str) -> dict[str, str]:
    """The entries of a section of a Google docstring; ``a, b: text`` describes both."""
    found = re.findall(r"^    ([\w, ]+): (.*(?:\n        .*)*)", section, flags=re.MULTILINE)
    return {name.strip(): text for names, text in found for name in names.split(",")}


def _values(module: ModuleType) -> Iterator[str]:
    """Constants, type aliases and functions of a module."""
    nodes = _nodes(module)
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        names = [one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        if isinstance(node, ast.FunctionDef) and node.name in module.__all__:
            summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
            yield f"| `{_signature(node)}` | {_cell(_plain(summary))} |\n"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = _plain(str(after.value.value)) if is_text else f"`{ast.unparse(node.value)}`"  # type: ignore[union-attr, arg-type]
            yield from (f"| `{name}` | {_cell(text)} |\n" for name in names if name in module.__all__)


def _nodes(module: ModuleType) -> list[ast.stmt]:
    """The statements of a module, or of all modules of a package."""
    path = Path(inspect.getfile(module))
    paths = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
    return [node for one in paths for node in ast.parse(one.read_text(encoding="utf-8")).body]


def _without_roles(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))


def _plain(text: str) -> str:
    return " ".join(_without_roles(text).split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(docstring: str) -> str:
    """A Google docstring as Markdown."""
    text = _without_roles(docstring)
    for section, heading in (
        ("Args", "Arguments"),
        ("Raises", "Raises"),
        ("Returns", "Returns"),
        ("Attributes", "Attributes"),
    ):
        text = re.sub(
            rf"^{section}:\n((?:    .*(?:\n|$))+)",
            lambda found, heading=heading: _as_list(heading, found[1]),
            text,
            flags=re.MULTILINE,
        )
    return text


def _as_list(heading: str, body: str) -> str:
    entries = _entries(body)
    if heading == "Returns" or not entries:
        return f"{heading}: {' '.join(body.split())}\n"
    return f"{heading}:\n\n" + "".join(f"- `{name}`: {' '.join(text.split())}\n" for name, text in entries.items())


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
