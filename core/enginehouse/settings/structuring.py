"""Strict conversion of plain data (TOML, JSON) into attrs classes, with the path of every problem.

Nothing is coerced: a bool is not an int, a number is not a string, a string is not a list. Only an int is accepted for
a float, and in request bodies a whole float for an int, because JSON has one number type. Unknown keys are problems.
Used for settings, plugin options and request fields; knows none of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import attrs
from attrs import frozen
from cattrs import Converter
from cattrs.cols import homogenous_tuple_structure_factory, list_structure_factory, mapping_structure_factory
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
)
from cattrs.gen import make_dict_structure_fn_from_attrs

from enginehouse.contract.errors import ConfigError, quoted

_Hook = Callable[[Any, Any], Any]

_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
    type(None): "null",
}

_MAX_NAME_CHARS = 200
_MAX_EXACT_FLOAT = 2**53

# Prefix of the messages of attrs' validators: 'name' must be ...
_VALIDATOR_MESSAGE = re.compile(r"^'(\w+)' ")


@frozen
class Problem:
    """One error in the data. ``path`` is dotted (``models.small.slots``), "" is the root."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def noun_of(value: Any) -> str:
    """Return the type of a value as text; the value itself is not shown, because it might be a key."""
    return _NOUNS.get(type(value), type(value).__name__)


def closest(name: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    """Return a hint such as `` (did you mean 'port'?)`` for a misspelt name, or "" if nothing is similar."""
    if len(name) > _MAX_NAME_CHARS:
        return ""  # names are shorter, and comparing long strings is slow
    cutoff = 0.75 if len(name) > 4 else 0.6  # of short names, one wrong letter is a quarter
    matches = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def without_fraction(value: Any) -> Any:
    """Convert a whole float to the integer of exactly its value; return anything else unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        return int(value)
    return value


def strict_converter(*, forbid_extra_keys: bool = True, whole_floats: bool = False) -> Converter:
    """Return a new converter with the rules of this module.

    Args:
        whole_floats: accept ``16.0`` as an integer, as written by clients without an integer type.
    """
    converter = Converter(forbid_extra_keys=forbid_extra_keys, detailed_validation=True)
    for wanted in (bool, int, float, str):
        converter.register_structure_hook(wanted, _exact(wanted))
    if whole_floats:
        exact_int = _exact(int)
        converter.register_structure_hook(int, lambda value, kind: exact_int(without_fraction(value), kind))
    converter.register_structure_hook_factory(_has_origin(Literal), _literal)
    for predicate, factory, accepted in (
        (_is_homogeneous_tuple, homogenous_tuple_structure_factory, list),
        (_has_origin(list), list_structure_factory, list),
        (_has_origin(dict), mapping_structure_factory, dict),
        (attrs.has, _attrs_class, dict),
    ):
        converter.register_structure_hook_factory(predicate, _guarded(converter, factory, accepted))
    return converter


@contextmanager
def converting(refuse: Callable[[list[Problem]], Exception], path: str = "") -> Iterator[None]:
    """Guard a conversion: raise ``refuse(problems)`` for any exception in the block.

    Validators and defaults of plugins' classes run in it, so that any exception may come.
    """
    try:
        yield
    except Exception as error:
        raise refuse(list(find_problems(error, path))) from error


def find_problems(error: Exception, path: str = "") -> Iterator[Problem]:
    """Yield every problem in an exception that a :func:`strict_converter` raised, with ``path`` as a prefix."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        with_notes, without = error.group_exceptions()
        for inner, note in with_notes:
            step = note.name if isinstance(note, AttributeValidationNote) else note.index
            yield from find_problems(inner, _join(path, step))
        for inner in without:
            yield from find_problems(inner, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = tuple(attribute.name for attribute in attrs.fields(error.cl))
        for name in sorted(error.extra_fields):
            yield Problem(_join(path, name), f"unknown setting{closest(name, known)}")
    elif isinstance(error, ConfigError):
        where = error.path or path
        yield Problem(where, error.message.removeprefix(f"{where}: "))
    elif isinstance(error, KeyError):
        yield Problem(path, "is required")
    else:
        text = str(error.args[0]) if error.args else type(error).__name__
        named = _VALIDATOR_MESSAGE.match(text)
        yield Problem(_join(path, named[1]), text[named.end() :]) if named else Problem(path, text)


def find_wide_integer(value: Any, path: str) -> tuple[str, str] | None:
    """Return path and digits (at most 40) of the first integer in plain data that exceeds 64 bits.

    Frames between processes cannot carry such integers.
    """
    if (found := _find_wide(value)) is None:
        return None
    steps, number = found
    digits = str(number)
    return functools.reduce(_join, steps, path), digits if len(digits) <= 40 else f"{digits[:37]}..."


def _find_wide(value: Any) -> tuple[tuple[Any, ...], int] | None:
    """Return the steps to that integer, and it; for every request, so that no path is made before it is needed."""
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else ((), value)
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        members = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    for step, item in members:
        if not isinstance(item, str) and (found := _find_wide(item)) is not None:
            return (step, *found[0]), found[1]
    return None


def _join(path: str, step: Any) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) is origin


def _is_homogeneous_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1:] == (...,)


def _exact(wanted: type) -> _Hook:
    accepted = (int, float) if wanted is float else (wanted,)

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise TypeError(f"must be {_NOUNS[wanted]}, not {_describe(value)}")
        return wanted(value)

    return structure


def _literal(kind: Any) -> _Hook:
    choices = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise ValueError(f"must be one of {', '.join(map(repr, choices))}, not {_describe(value)}")
        return value

    return structure


def _guarded(
    converter: Converter, factory: Callable[[Any, Converter], _Hook], accepted: type
) -> Callable[[Any], _Hook]:
    """Pass only ``accepted`` values to ``factory``'s hook; cattrs itself accepts any iterable."""

    def guarded_factory(kind: Any) -> _Hook:
        structure_items = factory(kind, converter)

        def structure(value: Any, kind: Any) -> Any:
            if not isinstance(value, accepted):
                # The value is not shown: a key that should be in a list would leak into a log.
                raise TypeError(f"must be {_NOUNS[accepted]}, not {noun_of(value)}")
            return structure_items(value, kind)

        return structure

    return guarded_factory


def _attrs_class(kind: Any, converter: Converter) -> _Hook:
    attrs.resolve_types(kind)
    return make_dict_structure_fn_from_attrs(
        attrs.fields(kind),
        kind,
        converter,
        _cattrs_forbid_extra_keys=converter.forbid_extra_keys,
        _cattrs_detailed_validation=True,
    )


def _describe(value: Any) -> str:
    shown = quoted(value) if isinstance(value, str) else repr(value) if isinstance(value, int | float) else ""
    return shown if 0 < len(shown) <= 60 else _NOUNS.get(type(value), type(value).__name__)
