"""The method ``semantic``, with embeddings of shared words: what belongs together, what repeats, what is central."""

from __future__ import annotations

import pytest

from enginehouse.contract.compressor import CompressibleText, CompressionTask, cut
from enginehouse_compress.semantic import SemanticCompressor
from enginehouse_compress.units import split_units
from enginehouse_testkit.fake_compression import FakeCompressionTools

STEPS = "To reset the pump, do this:\n\n1. Close the red valve. Wait.\n2. Press the knob.\n   Hold it.\n\n3. Let go."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Before. {STEPS}\n\nAfter. More.", ["Before.", STEPS, "After.", "More."]),
        ("- apples\n- pears", ["- apples", "- pears"]),
        ("1. Only one.\nAnother line.", ["1. Only one.", "Another line."]),
        ("1. a\n2. b\n1. c\n2. d", ["1. a\n2. b", "1. c\n2. d"]),
        ("手順：\n1、閉める。\n2、押す。\n終わり。", ["手順：\n1、閉める。\n2、押す。", "終わり。"]),  # noqa: RUF001
        ("Schritt 1: auf.\nSchritt 2: zu.\nEnde.", ["Schritt 1: auf.\nSchritt 2: zu.", "Ende."]),
        ("> One. Two.\n> Three.\nFour.", ["> One. Two.\n> Three.", "Four."]),
        ("Er rief: „Kommt!\nAlle!“ Sie kamen. Nein.", ["Er rief: „Kommt!\nAlle!“", "Sie kamen.", "Nein."]),
        ("Well.\n“It is never closed.\nOne.", ["Well.", "“It is never closed.", "One."]),
    ],
)
def test_lists_and_quotations_are_one_unit(text: str, expected: list[str]) -> None:
    assert [text[start:end] for start, end in split_units(text)] == expected


def kept(text: str, question: str, max_tokens: int) -> tuple[str, FakeCompressionTools]:
    tools = FakeCompressionTools()
    task = CompressionTask(texts=(CompressibleText(text=text),), question=question, max_tokens=max_tokens)
    (ranges,) = SemanticCompressor().compress(task, tools)
    return cut(task.texts[0], ranges), tools


RAIN = "\n".join(f"Rain fell on hill {number} and on field {number}." for number in range(8))


@pytest.mark.parametrize(
    ("question", "is_kept"),
    [("Which knob resets the pump?", True), ("Rain fell on which hill and on which field?", False)],
)
def test_numbered_list_is_kept_or_removed_whole(question: str, is_kept: bool) -> None:
    left, _ = kept(f"{RAIN}\n\n{STEPS}", question, 90)

    assert (STEPS in left) == is_kept
    assert is_kept or not any(word in left for word in ("valve", "knob", "Let go"))


def test_sentences_that_repeat_each_other_leave_room_for_others() -> None:
    """Nearest to the question are six sentences that say the same."""
    same = [f"The ferry leaves the island at six, said guide {number}." for number in range(6)]
    left, _ = kept("\n".join([*same, "The ferry costs nine crowns.", *["It was cold."] * 3]), "ferry island leaves", 45)

    assert "nine crowns" in left
    assert left.count("leaves the island") < 6


def test_neighbour_of_a_good_sentence_is_kept_before_others() -> None:
    others = [f"Painters of town {number} liked green." for number in range(12)]
    text = "\n".join([*others[:6], "The ferry belongs to a monk.", "He bought it from Oslo.", *others[6:]])
    left, _ = kept(text, "Who owns the ferry?", 60)

    assert "He bought it from Oslo." in left


def test_central_sentences_are_kept_without_a_question() -> None:
    voted = [f"The council of Ghent voted on road {number}." for number in range(6)]
    text = "\n".join([*voted[:3], "Zebras yawn purple.", *voted[3:]])
    _, tools = kept(text, "", 45)
    worst = min(tools.explained, key=lambda note: note[3] or 0.0)

    assert text[slice(*worst[1])] == "Zebras yawn purple."
    assert {reason for *_, reason, _ in tools.explained} == {
        "similarity to the whole text, less similarity to sentences that rank higher"
    }


def test_every_unit_is_explained_with_its_score() -> None:
    text = f"{RAIN}\n\n{STEPS}"
    _, tools = kept(text, "Which knob resets the pump?", 60)

    assert [part for _, part, *_ in tools.explained] == split_units(text)
    best = max(tools.explained, key=lambda note: note[3] or 0.0)
    assert text[slice(*best[1])] == STEPS
