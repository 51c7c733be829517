"""From a request body to a generation request: tools, the items of the conversation, and the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from enginehouse.contract.surface import new_id
from enginehouse.contract.types import GenerateRequest, Message
from enginehouse_responses.body import PromptBody, ResponsesBody
from enginehouse_responses.items import items_of, read_items, reference_of
from enginehouse_responses.reading import invalid
from enginehouse_responses.sealed import Seal
from enginehouse_responses.tools import Toolbox

__all__ = ["Conversation", "generate_request", "prompt_request"]


@frozen
class Conversation:
    """The items that a response answers, and the tools.

    Attributes:
        before: items of the stored responses that it continues.
        given: items of the request.
    """

    before: Sequence[Mapping[str, Any]]
    given: Sequence[dict[str, Any]]
    toolbox: Toolbox

    @classmethod
    def of(
        cls,
        body: PromptBody,
        before: Sequence[Mapping[str, Any]] = (),
        referenced: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> Conversation:
        """Return the conversation of a request.

        Args:
            referenced: the stored items to which its references point, by id.

        Raises:
            InvalidRequest: the input is missing, or a tool is malformed.
        """
        if body.input is None and body.previous_response_id is None:
            raise invalid("input", "is required without previous_response_id")
        given = [] if body.input is None else items_of(body.input)
        given = [referenced.get(reference_of(item) or "", item) for item in given]
        toolbox = Toolbox()
        if body.tools is not None:
            toolbox.add(body.tools, "tools")
        for index, item in enumerate(given):
            if item.get("type") == "additional_tools":
                toolbox.add(item.get("tools"), f"input[{index}].tools")
        return cls(before, given, toolbox)

    @property
    def items(self) -> list[Mapping[str, Any]]:
        """All items, oldest first."""
        return [*self.before, *self.given]

    def messages(
        self, instructions: str | None, seal: Seal, items: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[Message, ...]:
        """Return the chat; instructions at its beginning are one message.

        Args:
            items: those that are used; None is all.

        Raises:
            InvalidRequest: an item is malformed or unknown, or a message is missing.
        """
        messages = read_items(self.items if items is None else items, seal, len(self.before))
        if instructions:
            messages = (Message(role="system", content=instructions), *messages)
        if not messages:
            raise invalid("input", "must hold at least one item")
        return _with_one_opening(messages)


def prompt_request(
    body: PromptBody, conversation: Conversation, seal: Seal, items: Sequence[Mapping[str, Any]] | None = None
) -> GenerateRequest:
    """Return a request with the prompt, without options.

    Args:
        items: those of the conversation that are used; None is all.

    Raises:
        InvalidRequest: an item is malformed, or the tool choice does not fit.
    """
    return GenerateRequest(
        request_id=new_id("resp_"),
        model=body.model,
        messages=conversation.messages(body.instructions, seal, items),
        tool_use=conversation.toolbox.use(body.tool_choice, body.parallel_tool_calls),
        constraint=body.constraint(),
    )


def generate_request(body: ResponsesBody, prompt: GenerateRequest) -> GenerateRequest:
    """Return the request to generate the response.

    Raises:
        InvalidRequest: the reasoning fields contradict each other.
    """
    return evolve(
        prompt,
        thinking=body.thinking(),
        sampling=body.sampling(),
        stopping=body.stopping(),
        namespace=body.prompt_cache_key or "",
        priority=body.priority,
        cache_prompt=body.cache_prompt,
        return_progress=body.return_progress and bool(body.stream),
    )


def _with_one_opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Join the instructions at the beginning, of the field and of items, as many templates allow only one."""
    num_opening = 0
    while num_opening < len(messages) and messages[num_opening].role in ("system", "developer"):
        num_opening += 1
    if num_opening < 2 or any(message.parts for message in messages[:num_opening]):
        return messages
    text = "\n\n".join(message.content for message in messages[:num_opening])
    return (Message(role="system", content=text), *messages[num_opening:])
