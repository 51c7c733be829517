"""User text never forms control tokens, and benign prompts are encoded exactly as usual."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import Message, Segment
from enginehouse.engine.text.segments import ControlStrings, control_strings, encode_segments
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import Markers, render
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

TOKENIZER = FakeTokenizer()
SPECIAL = tuple(TOKENIZER.special_tokens)
END = "<|im_end|>"
START = "<|im_start|>"

fuzzy = settings(deadline=None, max_examples=400)
# Pieces that form control-token strings in many ways when they meet.
pieces = st.sampled_from(["<", "<|", "<|im_", "im_end", "|>", "end|>", ">", END, START, "x", " ", "\n", "é"])
values = st.lists(pieces, max_size=6).map("".join)


def trusted(text: str) -> Segment:
    return Segment(text, True)


def control_ids(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in TOKENIZER.control_token_ids]


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes[token_id] for token_id in token_ids).decode()


def test_the_fake_tokenizer_has_the_tokens_that_these_tests_need() -> None:
    assert {END, START} <= set(SPECIAL)


# --- encoding --------------------------------------------------------------------------------------


def test_trusted_text_is_encoded_as_a_whole_with_control_tokens() -> None:
    text = f"{START}user\nhello{END}\n"

    assert encode_segments(TOKENIZER, [trusted(text)], False) == TOKENIZER.encode(text, True)
    assert encode_segments(TOKENIZER, [trusted(text[:20]), trusted(text[20:])], False) == TOKENIZER.encode(text, True)


def test_untrusted_text_is_encoded_without_control_tokens() -> None:
    assert encode_segments(TOKENIZER, [Segment(END)], False) == TOKENIZER.encode(END, False)


def test_only_the_templates_own_control_strings_become_control_tokens() -> None:
    segments = [trusted(f"{START}user\nx"), Segment(END), trusted("\ny"), Segment(START), trusted(f"z{END}\n{START}a")]
    ids = TOKENIZER.special_tokens

    token_ids = encode_segments(TOKENIZER, segments, False)
    assert token_ids == [
        ids[START],
        *TOKENIZER.encode(f"user\nx{END}\ny{START}z", False),
        ids[END],
        *TOKENIZER.encode("\n", False),
        ids[START],
        *TOKENIZER.encode("a", False),
    ]


def test_text_between_control_tokens_is_encoded_as_one_string() -> None:
    """Whatever the borders of trust in it, and nowhere cut inside a run without untrusted text."""
    calls: list[tuple[str, bool]] = []

    class Recording(FakeTokenizer):
        def encode(self, text: str, special: bool) -> list[int]:
            calls.append((text, special))
            return super().encode(text, special)

    before, after = f"{START}a{END}\n{START}", f"{END}\n{START}b{END}"
    encode_segments(Recording(), [trusted(before + "user "), Segment(END), trusted(" x" + after)], False)

    assert calls == [(before, True), (f"user {END} x", False), (after, True)]


def test_prefix_is_added_once() -> None:
    prefix = list(TOKENIZER.prefix_token_ids)
    name = TOKENIZER.token_bytes[prefix[0]].decode()

    assert encode_segments(TOKENIZER, [trusted("a")], True) == prefix + TOKENIZER.encode("a", True)
    assert encode_segments(TOKENIZER, [trusted(name + "a")], True) == prefix + TOKENIZER.encode("a", True)
    assert encode_segments(TOKENIZER, [trusted("a")], False) == TOKENIZER.encode("a", True)
    assert encode_segments(TOKENIZER, [], True) == prefix
    assert encode_segments(TOKENIZER, [], False) == []


@fuzzy
@given(st.lists(st.tuples(values, st.booleans()), max_size=8))
@example([("<", False), ("<|im_", True), ("", False), ("end|>", True)])
def test_control_tokens_come_from_trusted_runs_only(parts: list[tuple[str, bool]]) -> None:
    segments = [Segment(text, is_trusted) for text, is_trusted in parts]
    runs: list[tuple[str, bool]] = []
    for text, is_trusted in parts:
        if runs and (runs[-1][1] == is_trusted or not text):
            runs[-1] = runs[-1][0] + text, runs[-1][1]
        elif text:
            runs.append((text, is_trusted))
    expected = [token_id for text, is_trusted in runs if is_trusted for token_id in TOKENIZER.encode(text, True)]

    token_ids = encode_segments(TOKENIZER, segments, False)
    assert text_of(token_ids) == "".join(text for text, _ in parts)
    assert control_ids(token_ids) == control_ids(expected)


# --- markers ---------------------------------------------------------------------------------------


def rendered(template: str, *contents: str, role: str = "user") -> tuple[Segment, ...]:
    messages = tuple(Message(role=role, content=content) for content in contents)
    prompt = ChatPrompt(
        template=template, messages=messages, special_tokens=SPECIAL, eos_token=END, add_generation_prompt=False
    )
    return render(prompt, 1_000_000)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
ADJACENT = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"


@fuzzy
@given(st.lists(values, min_size=1, max_size=4))
def test_no_user_text_forms_a_control_token(contents: list[str]) -> None:
    token_ids = encode_segments(TOKENIZER, rendered(TURNS, *contents), False)

    ids = TOKENIZER.special_tokens
    assert control_ids(token_ids) == [ids[START], ids[END]] * len(contents)
    assert text_of(token_ids) == "".join(f"{START}user\n{content.strip()}{END}\n" for content in contents)[:-1] + "\n"


@fuzzy
@given(st.lists(values, min_size=1, max_size=4))
@example(["<|im_", "end|>"])
@example(["x<|", "im_end", "|>"])
@example(["<|im_end \n", " ", "\t|>"])
@example(["<", "|im_end|>"])
def test_values_written_one_behind_the_other_form_no_control_token(contents: list[str]) -> None:
    token_ids = encode_segments(TOKENIZER, rendered(ADJACENT, *contents), False)

    assert control_ids(token_ids) == []
    assert text_of(token_ids) == "".join(content.strip() for content in contents)


@fuzzy
@given(st.lists(st.text(st.sampled_from("ab <>é\n漢"), max_size=20), min_size=1, max_size=4))
def test_benign_prompts_are_one_trusted_segment(contents: list[str]) -> None:
    segments = rendered(TURNS, *contents)
    text = "".join(f"{START}user\n{content.strip()}{END}\n" for content in contents)

    assert segments == (trusted(text),)
    assert encode_segments(TOKENIZER, segments, False) == TOKENIZER.encode(text, True)


def test_nested_control_strings_do_not_close_up() -> None:
    content = f"<|im_{END}end|>"

    assert rendered("{{ messages[0].content }}", content) == (trusted("<|im_"), Segment(END), trusted("end|>"))
    assert control_ids(encode_segments(TOKENIZER, rendered("{{ messages[0].content }}", content), False)) == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ c | trim }}", END),
        ("{{ c | upper }}{{ c | lower }}{{ c | title }}", END * 3),
        ("{{ c[:1] }}", END),
        ("{{ c | tojson }}", f'"{END}"'),
        ("{{ c | tojson(indent=2) }}", f'"{END}"'),
        ("{{ c | replace('<|im_end|>', '') }}", END),
        ("{{ c.split('<|im_end|>') | length }}", "1"),
        ("{{ c | e }}", END),
        ("{{ c | list | join('-') }}", END),
        ("{{ '%s' | format(c) }}{{ '{}'.format(c) }}{{ c ~ c }}", END * 4),
        ("{{ c | wordwrap(1) }}", END),
    ],
)
def test_markers_survive_what_templates_do(template: str, expected: str) -> None:
    segments = rendered("{% set c = messages[0].content %}" + template, END)

    assert "".join(segment.text for segment in segments) == expected
    assert END not in "".join(segment.text for segment in segments if segment.trusted)


def test_markers_are_drawn_anew_and_avoid_the_text() -> None:
    control = control_strings(SPECIAL)
    taken = "".join(map(chr, range(0xF0000, 0xF8000)))
    drawn = {Markers(control, [END + taken]).mark(END) for _ in range(200)}

    assert len(drawn) > 100
    assert not drawn & set(taken)
    assert all(len(marker) == 1 for marker in drawn)


def test_a_user_who_writes_private_characters_gets_them_back() -> None:
    private = "\U000f1234\U0010abcd"

    assert rendered("{{ messages[0].content }}", private + END) == (trusted(private), Segment(END))


def test_texts_with_all_private_characters_are_refused() -> None:
    everything = "".join(map(chr, (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))))

    with pytest.raises(RenderError, match="private Unicode characters"):
        rendered("{{ messages[0].content }}", everything + END)


def test_tags_that_the_template_looks_for_stay_visible_in_assistant_messages_only() -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    special = ("<think>", "</think>", END)

    def shown(role: str, content: str, template: str = template) -> tuple[Segment, ...]:
        messages = (Message(role=role, content=content),)
        return render(
            ChatPrompt(
                template=template,
                messages=messages,
                special_tokens=special,
                eos_token=END,
                add_generation_prompt=False,
            ),
            1000,
        )

    assert shown("assistant", "<think>a</think>b") == (trusted("b"),)
    assert shown("user", "a</think>b") == (trusted("a"), Segment("</think>"), trusted("b"))
    assert shown("assistant", "<think>a", template) == (trusted("<think>a"),)
    assert shown("assistant", "<think>a", "{{ messages[0].content }}") == (Segment("<think>"), trusted("a"))
    ends = "{{ messages[0].content.split('<|im_end|>')[0] }}"
    assert shown("assistant", f"a{END}b", ends) == (trusted("a"), Segment(END), trusted("b"))


def test_without_control_tokens_nothing_is_marked() -> None:
    assert Markers(ControlStrings(()), [END]).mark({"a": [END, 1, None, 2.5, True]}) == {"a": [END, 1, None, 2.5, True]}


# --- finding control-token strings -----------------------------------------------------------------


@fuzzy
@given(st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=6), st.text("ab<>", max_size=30))
def test_control_strings_are_found_leftmost_longest(strings: list[str], text: str) -> None:
    expected, start = [], 0
    while start < len(text):
        longest = max((len(string) for string in strings if text.startswith(string, start)), default=0)
        if longest:
            expected.append((start, start + longest))
        start += longest or 1

    control = ControlStrings(tuple(strings))
    assert list(control.find_all(text)) == expected
    assert not any(string in part for string in strings for part in _between(text, expected))


@fuzzy
@given(st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=6), st.text("ab<>", max_size=8))
def test_unfinished_control_strings_are_recognised(strings: list[str], text: str) -> None:
    ends = [
        (len(text) - size, string[size])
        for string in strings
        for size in range(1, len(string))
        if size <= len(text) and text.endswith(string[:size])
    ]
    start, continuations = ControlStrings(tuple(strings)).unfinished(text)

    assert start == min((start for start, _ in ends), default=len(text))
    assert continuations == {character for _, character in ends}


def test_thousands_of_control_strings_cost_no_more_than_a_few() -> None:
    """Gemma has about 6,400; a text of the characters that begin them is the worst case."""
    control = ControlStrings(tuple(f"<unused{number}>" for number in range(6400)))
    start = process_time()

    assert list(control.find_all("<unused" * 30_000)) == []
    assert process_time() - start < 10


def _between(text: str, spans: list[tuple[int, int]]) -> list[str]:
    ends = [0, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), len(text)]
    return [text[end:start] for end, start in zip(ends, starts, strict=True)]
