"""Reads plain JSON data by hand, with errors that name the path: items and tools have too many shapes for classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from enginehouse.contract.errors import InvalidRequest, quoted

__all__ = ["Node", "invalid", "node_of", "nodes_of"]


def invalid(path: str, problem: str) -> InvalidRequest:
    """Return the refusal of the value at ``path``."""
    return InvalidRequest(f"{path}: {problem}", path)


@frozen
class Node:
    """A JSON object and its path in the request. A member that is null counts as missing."""

    data: dict[str, Any]
    path: str

    def at(self, name: str) -> str:
        """Return the path of a member."""
        return f"{self.path}.{name}"

    def text(self, name: str) -> str:
        """Return a member that must be a string. Raises InvalidRequest."""
        value = self.data.get(name)
        if not isinstance(value, str):
            raise invalid(self.at(name), "must be a string")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a member that may be missing, else must be a string. Raises InvalidRequest."""
        return None if self.data.get(name) is None else self.text(name)

    def optional_flag(self, name: str) -> bool | None:
        """Return a member that may be missing, else must be true or false. Raises InvalidRequest."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self.at(name), "must be true or false")
        return value

    def one_of(self, name: str, *known: str, default: str | None = None) -> str:
        """Return a member that must be one of the strings ``known``. Raises InvalidRequest."""
        value = self.data.get(name)
        value = default if value is None else value
        if value not in known:
            raise invalid(self.at(name), f"must be one of {', '.join(map(repr, known))}, not {quoted(value)}")
        return str(value)

    def object(self, name: str) -> Node:
        """Return a member that must be an object. Raises InvalidRequest."""
        return node_of(self.data.get(name), self.at(name))

    def objects(self, name: str) -> Iterator[Node]:
        """Yield the entries of a member that must be a list of objects. Raises InvalidRequest."""
        return nodes_of(self.data.get(name), self.at(name))


def node_of(value: Any, path: str) -> Node:
    """Return a value that must be an object. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise invalid(path, "must be an object")
    return Node(value, path)


def nodes_of(value: Any, path: str) -> Iterator[Node]:
    """Yield the entries of a value that must be a list of objects. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise invalid(path, "must be a list")
    for index, item in enumerate(value):
        yield node_of(item, f"{path}[{index}]")
