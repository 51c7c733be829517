"""Resolves ``$ref`` and finds reference cycles. Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from enginehouse_llguidance.schemas.problems import SchemaProblem, join_pointer

__all__ = ["find_cycle", "resolve"]


def resolve(root: Any, reference: Any, pointer: str) -> tuple[str, Any]:
    """Return the pointer and the value that a reference points to.

    Args:
        pointer: location of the keyword ``$ref``, for errors.
    """
    if not isinstance(reference, str):
        raise SchemaProblem(pointer, "must be a string")
    if not reference.startswith("#"):
        raise SchemaProblem(pointer, f"{reference[:100]!r} is not part of this schema; nothing is fetched")
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        raise SchemaProblem(pointer, "anchors are not supported; use a JSON pointer such as '#/$defs/name'")
    value, steps = root, [step.replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:]]
    for step in steps:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isascii() and step.isdecimal() and int(step[:9]) < len(value):
            value = value[int(step)]
        else:
            raise SchemaProblem(pointer, f"{reference[:100]!r} leads nowhere")
    return join_pointer("", steps), value


def find_cycle(edges: Mapping[str, Iterable[str]], starts: Iterable[str]) -> str | None:
    """Return a node on a cycle that is reachable from ``starts``, or None."""
    done: set[str] = set()
    for start in starts:
        path: dict[str, Iterable[str]] = {start: iter(edges.get(start, ()))}
        while path:
            node = next(reversed(path))
            for following in path[node]:
                if following in path:
                    return following
                if following not in done:
                    path[following] = iter(edges.get(following, ()))
                    break
            else:
                done.add(node)
                del path[node]
    return None
