"""Finds reference cycles of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["find_cycle"]


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
