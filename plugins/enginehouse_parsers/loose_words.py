"""JSON of values that a model wrote without quotation marks: numbers, literals of JSON and Python, and texts."""

from __future__ import annotations

import json
import math
import re

from enginehouse_parsers.value_writer import as_json

__all__ = ["json_of_word"]

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ODD_NUMBER = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F_]+|[\d_]+\.?[\d_]*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)", re.ASCII
)
_COMMENT_AFTER = re.compile(r"\s(?://|/\*|#).*", re.DOTALL)
_LITERALS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "none": "null",
    "undefined": "null",
    "nan": "null",
    "infinity": "null",
    "-infinity": "null",
}


def json_of_word(word: str) -> str:
    """Return the JSON of a word; a text if it is nothing else."""
    word = _COMMENT_AFTER.sub("", word).strip()
    if not word:
        return "null"
    if (literal := _LITERALS.get(word.lower())) is not None:
        return literal
    if _NUMBER.fullmatch(word):
        return word
    if _ODD_NUMBER.fullmatch(word):
        try:
            number = int(word, 0) if "x" in word.lower() else float(word) if set(word) & set(".eE") else int(word)
            return "null" if isinstance(number, float) and not math.isfinite(number) else json.dumps(number)
        except ValueError:  # Python converts no more than 4,300 digits
            return as_json(word)
    return as_json(word)
