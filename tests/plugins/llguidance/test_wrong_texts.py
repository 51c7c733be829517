"""Texts that no answer begins with: found as by a search of all, without one."""

from __future__ import annotations

import itertools
import random
from typing import Any, ClassVar

from enginehouse_llguidance.wrong_texts import WrongTexts


class Counted(bytes):
    """Counts the comparisons of all its instances."""

    num_compared: ClassVar[int] = 0

    def __lt__(self, other: Any) -> bool:
        Counted.num_compared += 1
        return bytes.__lt__(self, other)

    def __gt__(self, other: Any) -> bool:
        Counted.num_compared += 1
        return bytes.__gt__(self, other)


def test_texts_are_found_as_by_a_search_of_all() -> None:
    texts = [bytes(one) for size in range(5) for one in itertools.product(b"a\xfe\xff", repeat=size)]
    for seed in range(60):
        chance = random.Random(seed)
        wrong, added = WrongTexts(), set[bytes]()
        for _ in range(chance.randrange(12)):
            added.add(chance.choice(texts[1:]))
        for one in sorted(added, key=lambda _: chance.random()):
            wrong.add(one)
        for text in texts:
            is_wrong = any(text.startswith(one) for one in added)
            assert wrong.has_beginning_of(text) == is_wrong
            if not is_wrong:
                least = {one for one in added if not any(one != other and one.startswith(other) for other in added)}
                expected = {one[len(text) :] for one in least if one.startswith(text) and len(one) - len(text) <= 2}
                assert set(wrong.after(text, 2)) == expected


def test_a_look_up_does_not_search_all() -> None:
    """Ten thousand values that were wrong: the mask of the next token compares a few of them."""
    wrong = WrongTexts()
    for number in range(10_000):
        wrong.add(Counted(b'{"items": [%05d,' % number))

    for text, num_after in ((b'{"items": ["a"', 0), (b'{"items": [', 0), (b'{"items": [0123', 10)):
        Counted.num_compared = 0

        assert not wrong.has_beginning_of(text)
        assert len(list(wrong.after(text, 2))) == num_after
        assert 0 < Counted.num_compared < 500
