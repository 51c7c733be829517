"""What of a request may be shortened."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.compressor import cut
from enginehouse.contract.types import GenerateRequest, MediaPart, Message, ToolCall
from enginehouse_compress.texts import RequestTexts, find_texts, with_texts

CALL = ToolCall(id="c", name="f", arguments="{}")


def find(*messages: Message, system: bool = False) -> RequestTexts:
    return find_texts(GenerateRequest(request_id="r", model=None, messages=messages), system=system)


def said(role: str, content: str, **fields: Any) -> Message:
    return Message(role=role, content=content, **fields)


def protected(found: RequestTexts) -> list[str]:
    return [cut(text, ()) for text in found.texts]


def test_documents_and_earlier_turns_may_be_shortened_but_not_the_question() -> None:
    found = find(
        said("user", "A long document.\n\nWhat does it say?"),
        said("assistant", "That it is long."),
        said("user", "Another document.\n\nAnd this one,\nwhat does it say?\n"),
    )

    assert found.places == (0, 1, 2)
    assert found.question == "And this one,\nwhat does it say?"
    assert protected(found) == ["", "", "And this one,\nwhat does it say?\n"]


def test_a_question_alone_is_left_alone() -> None:
    assert find(said("user", "What is the capital of France?")).texts == ()


def test_system_messages_stay_unless_the_operator_allows_it() -> None:
    messages = (said("system", "Be brief. Do not swear."), said("user", "Text.\n\nQuestion?"))

    assert find(*messages).places == (1,)
    assert find(*messages, system=True).places == (0, 1)


def test_calls_results_and_messages_with_images_stay() -> None:
    image = MediaPart(kind="image_url", value={}, param="messages[0].content[1]")
    found = find(
        said("user", "Look at this.", parts=("Look at this.", image)),
        said("assistant", "I shall call it.", tool_calls=(CALL,)),
        said("tool", "A long result. " * 50, tool_call_id="c"),
        said("user", "Text.\n\nQuestion?"),
    )

    assert found.places == (3,)


def test_an_answer_that_is_to_be_continued_stays() -> None:
    assert find(said("user", "Text.\n\nQuestion?"), said("assistant", "It says that")).places == (0,)


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("Before.\n```python\nx = 1\n```\nAfter.\n\nQ?", "```python\nx = 1\n```\nQ?"),
        ("Before.\n~~~\nnot closed\n\nQ?", "~~~\nnot closed\n\nQ?"),
        ("A ``` within a line.\n\nQ?", "Q?"),
        ("````\n```\nstill code\n````\nAfter.\n\nQ?", "````\n```\nstill code\n````\nQ?"),
        ("```\ncode\n\nwith an empty line\n```\nText.\n\nQ?", "```\ncode\n\nwith an empty line\n```\nQ?"),
    ],
)
def test_fenced_code_stays(content: str, kept: str) -> None:
    assert protected(find(said("user", content))) == [kept]


def test_what_the_client_marked_stays() -> None:
    content = "Keep this.\nNot this.\n\nQ?"

    assert protected(find(said("user", content, verbatim=((0, 10),)))) == ["Keep this.Q?"]
    assert find(said("user", content, verbatim=((0, 21),))).texts == ()


def test_a_raw_prompt_keeps_its_last_paragraph() -> None:
    request = GenerateRequest(request_id="r", model=None, text="A story.\n\nIt begins\nhere: ")
    found = find_texts(request, system=False)

    assert (found.question, protected(found)) == ("It begins\nhere:", ["It begins\nhere: "])
    assert with_texts(request, found, ["short"]).text == "short"
    assert find_texts(GenerateRequest(request_id="r", model=None, text="One line"), system=False).texts == ()


def test_shortened_texts_go_where_they_came_from() -> None:
    messages = (said("system", "Be brief."), said("user", "Text.\n\nQ?", verbatim=((0, 2),)), said("assistant", "A"))
    request = GenerateRequest(request_id="r", model=None, messages=(*messages, said("user", "Q?")))
    found = find_texts(request, system=False)
    shorter = with_texts(request, found, ["T", "."])

    assert found.places == (1, 2)
    assert [message.content for message in shorter.messages or ()] == ["Be brief.", "T", ".", "Q?"]
    assert (shorter.messages or ())[1].verbatim == ()
