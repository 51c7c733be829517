"""Bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``. Members that hold blocks are read by other modules."""

from __future__ import annotations

from typing import Any, Literal

from attrs import NOTHING, frozen

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.fields import MAX_STOP_CHARS, ParameterFields
from enginehouse.contract.rows import INT64_MAX, row

__all__ = ["CountTokensBody", "MessagesBody"]

_MAX_STOPS = 64
_NO_EFFECT = "Accepted so that clients work; has no effect."
_OBJECT = {"type": ["object", "null"]}


def _check_stops(_: Any, attribute: Any, value: tuple[str, ...]) -> None:
    if len(value) > _MAX_STOPS:
        raise ValueError(f"'{attribute.name}' must hold at most {_MAX_STOPS} strings, not {len(value)}")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in value):
        raise ValueError(f"'{attribute.name}' must hold strings of 1 to {MAX_STOP_CHARS} characters")


@frozen(kw_only=True, slots=False)  # so that the whole body can have a second base class
class CountTokensBody:
    """The members that the prompt depends on."""

    model: str | None = row("A name or alias of `/v1/models`; the first configured model without it.")
    messages: tuple[dict[str, Any], ...] = row(
        "Turns of the roles `user`, `assistant` and `system`, each a string or a list of blocks. A last turn of the "
        "assistant is continued.",
        default=NOTHING,
        keeps_nulls=True,
        schema={"minItems": 1},
    )
    system: Any = row("The system prompt, a string or a list of text blocks.", keeps_nulls=True)
    tools: tuple[dict[str, Any], ...] = row("Tools that the client runs.", default=(), keeps_nulls=True)
    tool_choice: Any = row("`auto`, `any`, `none`, or `tool` with a name.", keeps_nulls=True, schema=_OBJECT)
    thinking: Any = row("Without it a model does not reason.", keeps_nulls=True, schema=_OBJECT)
    output_config: Any = row(
        "`effort`, and `format`: a JSON Schema that the text follows.", keeps_nulls=True, schema=_OBJECT
    )
    output_format: Any = row("Another name of `output_config.format`.", keeps_nulls=True, schema=_OBJECT)
    cache_control: Any = row("Not needed by the prefix cache; with it, usage counts the tokens that the cache keeps.")

    @property
    def thinks(self) -> bool:
        """True if the model is asked to reason."""
        kind = self.thinking.get("type") if isinstance(self.thinking, dict) else None
        return kind in ("enabled", "adaptive") or (kind == "between_tools" and self._ends_with_results)

    @property
    def is_marked(self) -> bool:
        """True if something is marked to be cached; the prefix cache itself needs no marks."""
        contents = [self.system, *(message.get("content") for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        return self.cache_control is not None or any(
            isinstance(one, dict) and one.get("cache_control") is not None for one in (*blocks, *self.tools)
        )

    @property
    def _ends_with_results(self) -> bool:
        content = self.messages[-1].get("content") if self.messages else None
        blocks = content if isinstance(content, list) else ()
        return any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)


@frozen(kw_only=True)
class MessagesBody(CountTokensBody, ParameterFields):
    """The request body, with the parameters of all APIs, of which Anthropic's has three."""

    max_tokens: int = row(
        "Most tokens of the answer, reasoning included; more than the context has room for counts as the room.",
        default=NOTHING,
        bounds=(0, INT64_MAX),
    )
    stream: bool = row("Send the answer as events, while it is made.", default=False)
    stop_sequences: tuple[str, ...] = row(
        "Strings before which the text ends; the one that has ended it is in the response.",
        default=(),
        check=_check_stops,
        schema={"maxItems": _MAX_STOPS, "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}},
    )
    return_progress: bool = row(
        "Report the progress of the prefill, as `prompt_progress` in events `ping` of a stream.", default=False
    )
    timings_per_token: bool = row(
        "Add `timings`, as llama-server does, to the message and to the events of a stream.", default=False
    )
    metadata: Any = row(_NO_EFFECT)
    service_tier: Literal["auto", "standard_only"] | None = row(_NO_EFFECT)
    speed: str | None = row(_NO_EFFECT)
    inference_geo: str | None = row(_NO_EFFECT)
    user_profile_id: str | None = row(_NO_EFFECT)
    workspace_id: str | None = row(_NO_EFFECT)

    def stopping(self) -> dict[str, Any]:
        """Return the given stopping parameters. Raises InvalidRequest: there are two lists of stop strings."""
        if self.stop_sequences and self.stop:
            raise InvalidRequest("stop: not allowed together with stop_sequences; give one of them", "stop")
        return {**super().stopping(), **({"stop": self.stop_sequences} if self.stop_sequences else {})}
