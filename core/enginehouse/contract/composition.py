"""Composite constraints: fixed text, markers, and parts with constraints of their own, in sequence.

Tool parsers describe the calls of their format in this small language; structured decoders translate it into their own.
A :class:`.Constraint` of the kind ``composition`` holds one as JSON (:func:`compose`, :func:`read_composition`).
"""

from __future__ import annotations

import msgspec

from enginehouse.contract.types import Constraint

__all__ = [
    "Composition",
    "FreeText",
    "InOrder",
    "Marker",
    "Matching",
    "OneOf",
    "Repeated",
    "Text",
    "compose",
    "read_composition",
]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """Exactly this text; not empty."""

    text: str


class Marker(msgspec.Struct, frozen=True, tag="marker"):
    """The control token of this name, or the same string as text if the model has no such control token."""

    text: str


class FreeText(msgspec.Struct, frozen=True, tag="free"):
    """Any text; with ``until`` it ends with the first occurrence of that marker, marker included.

    Without ``until`` it may contain markers that are text, but no control tokens.
    """

    until: str | None = None


class Matching(msgspec.Struct, frozen=True, tag="matching"):
    """A text that matches another constraint; errors name that constraint's request field."""

    constraint: Constraint


class InOrder(msgspec.Struct, frozen=True, tag="in order"):
    """The parts one after the other."""

    parts: tuple[Composition, ...]


class OneOf(msgspec.Struct, frozen=True, tag="one of"):
    """Exactly one of the parts."""

    parts: tuple[Composition, ...]


class Repeated(msgspec.Struct, frozen=True, tag="repeated"):
    """The part repeated ``at_least`` to ``at_most`` times."""

    part: Composition
    at_least: int
    at_most: int


Composition = Text | Marker | FreeText | Matching | InOrder | OneOf | Repeated
"""A part of a text that a grammar is made of."""

_decoder: msgspec.json.Decoder[Composition] = msgspec.json.Decoder(Composition)


def compose(composition: Composition, param: str) -> Constraint:
    """Return a composition as a constraint; ``param`` is the request field that asked for it."""
    return Constraint(kind="composition", text=msgspec.json.encode(composition).decode(), param=param)


def read_composition(text: str) -> Composition:
    """Return the composition in a constraint's text."""
    return _decoder.decode(text)
