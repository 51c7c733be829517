"""Request bodies of Ollama's API. What is only checked by hand has the type ``Any``.

Source: https://github.com/ollama/ollama, ``api/types.go`` at 0.32.15. Members that are not here, such as ``shift``,
have no effect and are listed as ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import ge, le, optional

__all__ = [
    "ChatBody",
    "EmbedBody",
    "EmbeddingsBody",
    "FunctionBody",
    "GenerateBody",
    "MessageBody",
    "ModelBody",
    "ToolBody",
]


@frozen(kw_only=True)
class MessageBody:
    """A message; ``tool_calls`` are read with the chat."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: tuple[str, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_name: str | None = None
    tool_call_id: str | None = None


@frozen(kw_only=True)
class FunctionBody:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class ToolBody:
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionBody


@frozen(kw_only=True)
class _GenerationBody:
    """Members of both generating bodies.

    Attributes:
        format: ``"json"`` or a JSON Schema.
        keep_alive: seconds, or a duration such as ``"5m"``; 0 and negative ones unload and pin the model.
        think: true, false or a level.
        return_progress: report the progress of the prefill, as ``prompt_progress`` in objects of a stream.
        timings_per_token: add llama-server's ``timings`` to the objects.
    """

    model: str
    stream: bool = True
    format: Any = None
    options: dict[str, Any] = field(factory=dict)
    think: Any = None
    keep_alive: Any = None
    logprobs: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    top_logprobs: int = field(default=0, validator=[ge(0), le(20)])


@frozen(kw_only=True)
class ChatBody(_GenerationBody):
    """The body of ``/api/chat``; without messages, the model is loaded or unloaded."""

    messages: tuple[MessageBody, ...] = ()
    tools: tuple[ToolBody, ...] = ()


@frozen(kw_only=True)
class GenerateBody(_GenerationBody):
    """The body of ``/api/generate``; without a prompt, the model is loaded or unloaded."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: tuple[int, ...] = ()
    raw: bool = False
    images: tuple[str, ...] = ()


@frozen(kw_only=True)
class ModelBody:
    """The bodies that name a model only, by its present or its former member."""

    model: str = ""
    name: str = ""
    stream: bool = True

    @property
    def asked(self) -> str:
        """The name of the model."""
        return self.model or self.name


@frozen(kw_only=True)
class _EmbeddingBody:
    """Members of both bodies about embeddings. Of ``options``, none has an effect."""

    model: str
    options: dict[str, Any] = field(factory=dict)
    keep_alive: Any = None
    truncate: bool = True
    dimensions: int | None = field(default=None, validator=optional(ge(1)))


@frozen(kw_only=True)
class EmbedBody(_EmbeddingBody):
    """The body of ``/api/embed``; without an input, the model is loaded.

    Attributes:
        input: a text, or a list of texts.
    """

    input: Any = None


@frozen(kw_only=True)
class EmbeddingsBody(_EmbeddingBody):
    """The body of ``/api/embeddings``, the former address; without a prompt, the model is loaded."""

    prompt: str = ""
