"""The token ids that a tokenizer puts around one text and around two, found by encoding short texts.

Called when a model is opened. Knows the tokenizer's library, not the model.
"""

from __future__ import annotations

from typing import Any

from enginehouse.contract.pooler import TextLayout

__all__ = ["find_layouts", "lowercase_first"]


def find_layouts(tokenizer: Any, *, takes_types: bool) -> tuple[TextLayout, TextLayout | None]:
    """Return the layouts of one text and of a pair of a ``tokenizers.Tokenizer`` that neither cuts nor pads.

    The second is None if the token types of a pair are not those of BERT.

    Args:
        takes_types: the model gets token types from this tokenizer.
    """
    one, two = tokenizer.encode("a"), tokenizer.encode("a", "b")
    text, first, second = _text(one, 0), _text(two, 0), _text(two, 1)
    types = list(two.type_ids)
    is_typed = takes_types and types == [0] * second.start + [1] * (len(types) - second.start)
    pair = None
    if is_typed or not takes_types or not any(types):
        pair = TextLayout(
            tuple(two.ids[: first.start]),
            tuple(two.ids[first.stop : second.start]),
            tuple(two.ids[second.stop :]),
            types=is_typed,
        )
    return TextLayout(tuple(one.ids[: text.start]), (), tuple(one.ids[text.stop :])), pair


def _text(encoding: Any, number: int) -> slice:
    """Return where a text is between the ids of the layout."""
    owners = list(encoding.sequence_ids)
    return slice(owners.index(number), len(owners) - owners[::-1].index(number))


def lowercase_first(tokenizer: Any) -> None:
    """Make a ``tokenizers.Tokenizer`` convert texts to lower case before anything else."""
    from tokenizers import normalizers  # noqa: PLC0415 - few models ask for it

    own = tokenizer.normalizer
    steps = [normalizers.Lowercase(), *([] if own is None else [own])]
    tokenizer.normalizer = normalizers.Sequence(steps)
