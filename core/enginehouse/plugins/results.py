"""Checks what a plugin returns against the return type that its contract declares.

Does not know plugins: ``guard`` names them. A value of the declared class is taken as it is; the elements of sequences
and the fields of attrs classes are checked one level deep, so that the cost does not grow with the request.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import numpy as np
from attrs import frozen

_DEPTH = 2

_NUMBERS: Mapping[Any, Any] = {float: int | float | np.floating | np.integer, int: int | np.integer}
"""Types that are accepted for numbers, besides bool."""


@frozen
class Expectation:
    """The expected type of a result.

    Attributes:
        annotation: the declared type.
        is_share: the number must be from 0 to 1.
    """

    annotation: Any
    is_share: bool = False

    def check(self, value: Any) -> str | None:
        """Return what is wrong with a value, as the end of a sentence; None if it is right."""
        if self.annotation is Any or self.annotation is type(None):
            return None
        if not _fits(value, self.annotation, _DEPTH):
            expected = "a number from 0 to 1" if self.is_share else _described(self.annotation)
            return f"gave {_found(value, self.annotation)}, {expected} was expected"
        if self.is_share and not 0 <= value <= 1:
            return f"gave {value!r}, a number from 0 to 1 was expected"
        return None


def _fits(value: Any, annotation: Any, depth: int) -> bool:
    if annotation is Any or (type(value) is annotation and depth < _DEPTH):
        return True
    if (origin := get_origin(annotation)) is not None:
        return _fits_generic(value, annotation, origin, depth)
    if annotation in _NUMBERS:
        return isinstance(value, _NUMBERS[annotation]) and not isinstance(value, bool)
    if getattr(annotation, "_is_protocol", False):
        return not _lacking(value, annotation)
    if not isinstance(annotation, type):
        return True  # a type variable, for example
    return isinstance(value, annotation) and (depth < _DEPTH or _fits_fields(value))


def _fits_generic(value: Any, annotation: Any, origin: Any, depth: int) -> bool:
    if origin in (Union, types.UnionType):
        options = get_args(annotation)
        return (value is None and types.NoneType in options) or any(_fits(value, one, depth) for one in options)
    if origin is Literal:
        return value in get_args(annotation)
    if issubclass(origin, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        element = get_args(annotation)[0]
        return depth <= 0 or all(_fits(one, element, depth - 1) for one in value)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    return isinstance(value, origin)


def _fits_fields(value: Any) -> bool:
    return not attrs.has(type(value)) or all(
        _fits(getattr(value, name), annotation, 1) for name, annotation in _fields_of(value).items()
    )


def _fields_of(value: Any) -> Mapping[str, Any]:
    kind: Any = type(value)
    return _fields(kind)


@cache
def _fields(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in attrs.fields(kind)}


@cache
def _required(protocol: Any) -> tuple[str, ...]:
    """Return the members of an interface, inherited ones included."""
    members: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            members |= dict.fromkeys((*inspect.get_annotations(base), *vars(base)))
    return tuple(name for name in members if not name.startswith("_"))


def _lacking(value: Any, protocol: Any) -> list[str]:
    return [name for name in _required(protocol) if not hasattr(value, name)]


def _found(value: Any, annotation: Any) -> str:
    """Describe a wrong value: its type, and what is wrong with it if the type is right."""
    name = type(value).__name__
    if get_origin(annotation) in (Union, types.UnionType):
        # The interface that the object comes closest to, if it has some of its members.
        interfaces = [one for one in get_args(annotation) if getattr(one, "_is_protocol", False)]
        closest = min(interfaces, key=lambda one: len(_lacking(value, one)), default=None)
        if closest is not None and 2 * len(_lacking(value, closest)) < len(_required(closest)):
            annotation = closest
    if isinstance(annotation, type) and getattr(annotation, "_is_protocol", False):
        return f"{name} without {', '.join(_lacking(value, annotation))}" if value is not None else "None"
    if isinstance(annotation, type) and isinstance(value, annotation) and attrs.has(type(value)):
        wrong = next(key for key, kind in _fields_of(value).items() if not _fits(getattr(value, key), kind, 1))
        kind = _fields_of(value)[wrong]
        return f"{name} whose {wrong} is {type(getattr(value, wrong)).__name__} instead of {_plain_name(kind)}"
    if get_origin(annotation) is not None and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        arguments = get_args(annotation)
        wrong_one = next((one for one in value if arguments and not _fits(one, arguments[0], 1)), None)
        return f"{name} with {type(wrong_one).__name__}" if value else name
    return name


def _described(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a sequence of {_plain_name(get_args(annotation)[0])}"
    return _plain_name(annotation)


def _plain_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if annotation is type(None):
        return "None"
    if origin in (Union, types.UnionType):
        return " or ".join(_plain_name(one) for one in get_args(annotation))
    if origin is not None:
        return str(annotation).replace("collections.abc.", "").replace("typing.", "")
    return getattr(annotation, "__name__", str(annotation))
