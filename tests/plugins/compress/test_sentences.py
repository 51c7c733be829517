"""Where sentences begin and end."""

from __future__ import annotations

import pytest

from enginehouse_compress.sentences import split_sentences


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two!  Three?\nFour", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Vale met Mrs. Holm at 6.30. They left.", ["Dr. Vale met Mrs. Holm at 6.30.", "They left."]),
        ("It costs 3.50 euros, e.g. in Ghent. Fine.", ["It costs 3.50 euros, e.g. in Ghent.", "Fine."]),
        ('He said "Wait. Not now." and left. She stayed.', ['He said "Wait. Not now." and left.', "She stayed."]),
        ("“Come in. Sit.” He sat.", ["“Come in. Sit.”", "He sat."]),
        ("- apples\n- pears\n\nEnd.", ["- apples", "- pears", "End."]),
        ("彼は来た。彼女は行った。", ["彼は来た。", "彼女は行った。"]),
        ("See https://a.example/b?c=d. Then go.", ["See https://a.example/b?c=d.", "Then go."]),
        ('Data:\n{"a": 1,\n "b": "x. y"}\nDone.', ["Data:", '{"a": 1,\n "b": "x. y"}', "Done."]),
        ("他说：“来吧。我们走。”他笑了。天黑了。", ["他说：“来吧。我们走。”他笑了。", "天黑了。"]),  # noqa: RUF001
        ("彼は「行くよ。待って。」と言った。終わり。", ["彼は「行くよ。待って。」と言った。", "終わり。"]),
        (
            "ผู้จัดการบอกว่าห้องพักเต็มแล้ววันนี้ กรุณาโทรมาใหม่พรุ่งนี้เช้า เรือออกทุกวันธรรมดา",
            ["ผู้จัดการบอกว่าห้องพักเต็มแล้ววันนี้", "กรุณาโทรมาใหม่พรุ่งนี้เช้า เรือออกทุกวันธรรมดา"],
        ),
        ("यह पहला वाक्य है। यह दूसरा है।", ["यह पहला वाक्य है।", "यह दूसरा है।"]),
        ("هل جاء؟ نعم جاء.", ["هل جاء؟", "نعم جاء."]),
        ("1. Close it. Wait.\n2. Open it.", ["1. Close it.", "Wait.", "2. Open it."]),
        ("Am 2. Mai kamen sie. Es war 1987. Dann nicht.", ["Am 2. Mai kamen sie.", "Es war 1987.", "Dann nicht."]),
        ("Wait... what? No...", ["Wait...", "what?", "No..."]),
        ("", []),
        (" \n \n", []),
    ],
)
def test_sentences_of_texts(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_a_bracket_that_is_never_closed_does_not_hold_everything() -> None:
    text = "{\n" + "A line that says something.\n" * 300

    assert len(sentences(text)) > 100


def test_a_quotation_that_is_never_closed_does_not_hold_everything() -> None:
    text = 'He said "never mind. ' + "Then he went on talking. " * 200

    assert len(sentences(text)) > 50


def test_parts_lie_inside_of_the_piece_that_was_asked_for() -> None:
    text = "One. Two. Three. Four."

    assert [text[a:b] for a, b in split_sentences(text, 5, 16)] == ["Two.", "Three."]
