"""Incremental text equals what the whole text would give, however it was cut into tokens."""

from __future__ import annotations

import codecs
import re
from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.engine.text.text_stream import StopAutomaton, TextPiece, TextStream, stop_automaton

EVERYTHING = "Grüße 漢字かな 한국어 🧑🏽‍🚀 🇨🇦 \U0001d518 e\u0301"
CONTROL = frozenset({0})

fuzzy = settings(deadline=None, max_examples=400)
texts = st.text(st.sampled_from("aab<|é漢🧑\u0301\ufffd"), max_size=24)
stops = st.lists(st.text(st.sampled_from("aab<|é漢🧑"), min_size=1, max_size=4), max_size=4).map(tuple)


def stream_of(
    chunks: list[bytes | None], stop: tuple[str, ...] = (), patterns: tuple[str, ...] = ()
) -> tuple[TextStream, list[int]]:
    """A stream and the token ids of ``chunks``; None is a control token."""
    table = [b"<|control|>", *dict.fromkeys(chunk for chunk in chunks if chunk is not None)]
    return TextStream(table, CONTROL, stop, patterns), [
        0 if chunk is None else table.index(chunk, 1) for chunk in chunks
    ]


def pieces_of(
    chunks: list[bytes | None], stop: tuple[str, ...] = (), patterns: tuple[str, ...] = ()
) -> list[TextPiece]:
    """All pieces of a sequence that ends at the stop string or after the last token."""
    stream, token_ids = stream_of(chunks, stop, patterns)
    pieces = []
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        if pieces[-1].stop is not None:
            return pieces
    return [*pieces, stream.flush()]


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The naive algorithm: text before the stop string that is complete first, and that string."""
    found = [(text.find(one) + len(one), -len(one), one) for one in stop if one in text]
    if not found:
        return text, None
    end, minus_length, one = min(found)
    return text[: end + minus_length], one


def characters_of(chunks: list[bytes | None]) -> tuple[str, list[int]]:
    """The decoded text, and per token how many of its characters must be shown to show the token.

    Decodes byte by byte and attributes each character to the bytes that it was made of.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, open_bytes, first_character, num_before = "", [], {}, []
    for number, chunk in enumerate(chunks):
        num_before.append(len(text))
        for position in range(len(chunk or b"")):
            new = decoder.decode(chunk[position : position + 1])
            is_open = bool(decoder.getstate()[0])
            if len(new) == 2 or (new and is_open):  # the open character was broken by this byte
                for token in open_bytes:
                    first_character.setdefault(token, len(text))
                open_bytes = []
            open_bytes.append(number)
            if (new and not is_open) or len(new) == 2:
                for token in open_bytes:
                    first_character.setdefault(token, len(text) + len(new) - 1)
                open_bytes = []
            text += new
    visible_at, before = [], 0
    for number, chunk in enumerate(chunks):
        own = first_character[number] + 1 if number in first_character else len(text) + 1
        visible_at.append(before := max(before, own if chunk else num_before[number]))
    return text, visible_at


@st.composite
def chunkings(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes | None]:
    """Bytes cut anywhere, also inside characters, with empty and control tokens in between."""
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    chunks: list[bytes | None] = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    for place in draw(st.lists(st.integers(0, len(chunks)), max_size=2)):
        chunks.insert(place, None)
    return chunks


valid = chunkings(texts.map(str.encode))
arbitrary = chunkings(
    st.binary(max_size=12)
    | st.lists(st.sampled_from(["a", "b", "é", "漢", "🧑"])).map(lambda characters: "".join(characters).encode()[:-1])
)


@fuzzy
@given(valid, stops)
def test_text_equals_the_naive_whole_string_result(chunks: list[bytes | None], stop: tuple[str, ...]) -> None:
    whole = b"".join(chunk or b"" for chunk in chunks).decode()
    pieces = pieces_of(chunks, stop)

    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == first_stop(whole, stop)


PATTERNS = ("b+a", "a[^b]*b", "(a|ab)(c|é)", "(?m)^b", "漢{2}", "(?i)<A", "(?s)a.b", "(b?){2}a")


@fuzzy
@given(valid, stops, st.lists(st.sampled_from(PATTERNS), max_size=2).map(tuple))
def test_expressions_end_the_text_like_strings(
    chunks: list[bytes | None], stop: tuple[str, ...], patterns: tuple[str, ...]
) -> None:
    """The first end of any match counts, at that end the earliest beginning, however the text is split."""
    whole = b"".join(chunk or b"" for chunk in chunks).decode()
    pieces = pieces_of(chunks, stop, patterns)
    either = [re.compile(one) for one in (*map(re.escape, stop), *patterns)]
    spans = [(end, start) for end in range(len(whole) + 1) for start in range(end)]
    first = next((span for span in spans if any(one.fullmatch(whole, *span[::-1]) for one in either)), None)
    expected = (whole, None) if first is None else (whole[: first[1]], whole[first[1] : first[0]])

    assert ("".join(piece.text for piece in pieces), pieces[-1].stop) == expected


def test_text_is_held_back_only_while_it_may_match() -> None:
    stream, ids = stream_of([b"x a", b"a", b"c", b"ab", b"!"], (), ("a+b!",))

    assert [stream.push(token_id).text for token_id in ids[:4]] == ["x ", "", "aac", ""]
    assert stream.push(ids[4]) == TextPiece("", (), "ab!")


def test_a_long_match_loses_its_last_thousand_characters() -> None:
    chunks = [b"<", *[b"ab"] * 1000, b">", b"!"]
    pieces = pieces_of(chunks, (), ("<[^>]*>",))

    assert "".join(piece.text for piece in pieces) == "<" + "ab" * 500 + "a"
    assert pieces[-1].stop == "b" + "ab" * 499 + ">"


@fuzzy
@given(arbitrary, stops)
@example([b"\xe2", b"x"], ("x",))
@example([b"\xf0\x9f", b"\xe2\x82\xac"], ("\ufffd",))
@example([b"\xed", b"\xa0\x80a"], ("a",))
@example([b"a\xc2", b"\xc2"], ())
def test_visible_tokens_travel_with_their_text(chunks: list[bytes | None], stop: tuple[str, ...]) -> None:
    text, visible_at = characters_of(chunks)
    shown, stopped_by = first_stop(text, stop)
    stream, token_ids = stream_of(chunks, stop)
    num_shown, visible = 0, []
    for number, token_id in enumerate(token_ids):
        piece = stream.push(token_id)
        num_shown += len(piece.text)
        visible += piece.token_ids

        pushed = visible_at[: number + 1]
        assert len(visible) == sum(needed <= num_shown for needed in pushed)
        assert visible == token_ids[: len(visible)]
        if piece.stop is not None:
            break
        assert stream.num_pending == number + 1 - len(visible)
    else:
        piece = stream.flush()
        num_shown += len(piece.text)
        visible += piece.token_ids

    assert (num_shown, piece.stop) == (len(shown), stopped_by)
    if piece.stop is None:
        assert visible == token_ids
    assert stream.num_pending == 0


@fuzzy
@given(arbitrary)
def test_invalid_bytes_become_replacement_characters_as_in_the_whole(chunks: list[bytes | None]) -> None:
    whole = b"".join(chunk or b"" for chunk in chunks)

    assert "".join(piece.text for piece in pieces_of(chunks)) == characters_of(chunks)[0]
    assert "".join(piece.text for piece in pieces_of(chunks)) in (
        whole.decode("utf-8", "replace"),
        whole.decode("utf-8", "replace")[:-1],  # an incomplete last character is dropped
    )


@fuzzy
@given(valid, stops)
def test_no_character_waits_longer_than_needed(chunks: list[bytes | None], stop: tuple[str, ...]) -> None:
    stream, token_ids = stream_of(chunks, stop)
    decoder = codecs.getincrementaldecoder("utf-8")()
    shown = decoded = ""
    for token_id, chunk in zip(token_ids, chunks, strict=True):
        decoded += decoder.decode(chunk or b"")
        piece = stream.push(token_id)
        if piece.stop is not None:
            return
        shown += piece.text
        held = decoded[len(shown) :]
        claimed = [
            decoded[start:]
            for start in range(len(decoded))
            if any(one != decoded[start:] and one.startswith(decoded[start:]) for one in stop)
        ]

        assert held == (claimed[0] if claimed else "")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_characters_split_over_tokens_arrive_whole(size: int) -> None:
    data = EVERYTHING.encode()
    pieces = pieces_of([data[start : start + size] for start in range(0, len(data), size)])

    assert "".join(piece.text for piece in pieces) == EVERYTHING
    for piece in pieces:
        piece.text.encode()  # no lone surrogate


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("red green blue violet orange", "green blu", "red "),
        ("mountaineering equipment", "neering", "mountai"),
        ("mountaineering equipment", "quip", "mountaineering e"),
        ("stop at once", "stop", ""),
        ("aaab", "aab", "a"),
    ],
)
def test_stop_strings_end_the_text_across_and_inside_tokens(text: str, stop: str, expected: str) -> None:
    for size in (1, 2, 3, 7, 100):
        pieces = pieces_of([text[start : start + size].encode() for start in range(0, len(text), size)], (stop,))

        assert "".join(piece.text for piece in pieces) == expected
        assert pieces[-1].stop == stop


def test_the_stop_string_that_is_complete_first_wins() -> None:
    for size in (1, 4):
        chunks = ["abcd"[start : start + size].encode() for start in range(0, 4, size)]

        assert [piece.stop for piece in pieces_of(chunks, ("abcd", "bc"))][-1] == "bc"
        assert [piece.stop for piece in pieces_of(chunks, ("bc", "abc"))][-1] == "abc"


def test_a_token_is_visible_when_one_of_its_characters_is() -> None:
    stream, (mount, ain, eering) = stream_of([b"mount", b"ain", b"eering"], ("nee",))

    assert stream.push(mount) == TextPiece("mount", (mount,))
    assert stream.push(ain) == TextPiece("ai", (ain,))
    assert stream.push(eering) == TextPiece("", (), "nee")
    assert stream.num_pending == 0


def test_a_held_token_travels_with_its_text_when_the_stop_string_fails() -> None:
    stream, (a, b, c) = stream_of([b"a", b"b", b"c"], ("abx",))

    assert stream.push(a) == TextPiece("")
    assert stream.push(b) == TextPiece("")
    assert stream.push(c) == TextPiece("abc", (a, b, c))


def test_flush_shows_held_text() -> None:
    stream, (a, b) = stream_of([b"a", b"b"], ("abx",))
    stream.push(a)
    stream.push(b)

    assert stream.flush() == TextPiece("ab", (a, b))
    assert stream.flush() == TextPiece("")


def test_flush_drops_a_character_cut_in_two_but_not_its_tokens() -> None:
    stream, (a, half) = stream_of([b"a\xf0", b"\x9f\xa7"])

    assert stream.push(a) == TextPiece("a", (a,))
    assert stream.push(half) == TextPiece("")
    assert stream.flush() == TextPiece("", (half,))
    assert stream.flush() == TextPiece("")


def test_control_tokens_are_listed_without_text() -> None:
    stream, (a, control, b) = stream_of([b"a", None, b"b"])

    assert [stream.push(token_id) for token_id in (a, control, b)] == [
        TextPiece("a", (a,)),
        TextPiece("", (control,)),
        TextPiece("b", (b,)),
    ]


def test_stop_strings_are_not_looked_for_in_control_tokens() -> None:
    assert pieces_of([b"a", None, b"b"], ("control",))[-1].stop is None
    assert pieces_of([b"a", None, b"b"], ("ab",))[-1].stop == "ab"


def test_stop_strings_are_looked_for_in_the_answer_only() -> None:
    """Not in reasoning, its end, and the white space behind that, but from the answer's first character on."""
    thought, end, lines, answer, _ = chunks = [b"a\nb.", b"\n</think>", b"\n\n", b"4", b"\n"]
    stream, ids = stream_of(list(chunks), ("\n", ".", "k>"))

    pieces = [
        stream.push(token_id, is_reasoning=chunk in (thought, end)) for token_id, chunk in zip(ids, chunks, strict=True)
    ]
    assert [piece.text.encode() for piece in pieces] == [thought, end, lines, answer, b""]
    assert [piece.token_ids for piece in pieces] == [(token_id,) for token_id in ids[:4]] + [()]
    assert pieces[-1].stop == "\n"


def test_text_that_was_held_back_when_reasoning_begins_is_shown() -> None:
    stream, (start, thought, x) = stream_of([b"<think>", b"a", b">x"], (">x",))

    assert stream.push(start) == TextPiece("<think", (start,))
    assert stream.push(thought, is_reasoning=True) == TextPiece(">a", (thought,))
    assert stream.push(x).stop == ">x"


def test_nothing_is_visible_after_a_stop_string() -> None:
    stream, (a, b) = stream_of([b"a", b"b"], ("a",))

    assert stream.push(a) == TextPiece("", (), "a")
    assert stream.push(b) == TextPiece("", (), "a")
    assert stream.flush() == TextPiece("", (), "a")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(("a", ""))


def test_choices_share_an_automaton() -> None:
    assert stop_automaton(("x", "y")) is stop_automaton(("x", "y"))


def test_time_is_linear_for_the_worst_stop_strings() -> None:
    """Every character of a^n nearly completes a^m b; the naive search would need n * m comparisons."""
    automaton = StopAutomaton(("a" * 20_000 + "b",))
    start = process_time()
    state, num_read, found = automaton.scan(0, "a" * 200_000)

    assert (automaton.depth[state], num_read, found) == (20_000, 200_000, None)
    assert process_time() - start < 10
