"""Bodies of any JSON: refused by name, or taken; never an error of the server."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from enginehouse.contract.errors import RequestError
from enginehouse_responses.body import ResponsesBody
from enginehouse_responses.conversation import Conversation, generate_request, prompt_request
from enginehouse_responses.resource import Resource
from enginehouse_responses.sealed import Seal

SEAL = Seal(b"")
WORDS = (
    "message function_call function_call_output custom_tool_call reasoning item_reference user assistant input_text "
    "input_image function custom namespace web_search allowed_tools grammar lark regex json_schema auto required a"
)
NAMES = (
    "type role content text call_id name arguments output id namespace tools mode format syntax definition parameters "
    "schema effort summary input image_url strict"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS.split()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=5),
    max_leaves=12,
)
FIELDS = ("input", "tools", "tool_choice", "text", "reasoning", "stream_options", "conversation", "image")


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1), st.lists(JSON, max_size=4))
def test_any_body_is_taken_or_refused(fields: dict[str, Any], items: list[Any]) -> None:
    body = ResponsesBody(**{"input": items, **fields})
    try:
        body.check()
        conversation = Conversation.of(body)
        request = generate_request(body, prompt_request(body, conversation, SEAL))
        resource = Resource.of("resp_1", "m", body, conversation.toolbox, is_stored=False)
    except RequestError as error:
        assert error.param is not None
    else:
        assert request.messages and resource.to_plain([])["id"] == "resp_1"
