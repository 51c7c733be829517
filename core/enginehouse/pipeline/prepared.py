"""A request that is ready to start on a model, and its form for engines. Made by the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from enginehouse.contract.types import Chat, EngineRequest, GenerateRequest
from enginehouse.pipeline.model_profile import ModelProfile
from enginehouse.pipeline.parameters import Parameters
from enginehouse.pipeline.preparing import Reports
from enginehouse.pipeline.prompting import Prompt
from enginehouse.serving import LoadedModel

__all__ = ["Prepared", "engine_request"]


@frozen(eq=False, kw_only=True)
class Prepared:
    """A request that is ready to start on a model.

    Attributes:
        asked: the request without what the model does not support.
        request: the same as rendered: changed by preparers of plugins, its media read.
        model_profile: profile of the model.
        prompt: the rendered prompt.
        prediction_token_ids: of the predicted answer; None without one.
        unsupported: parameters that were dropped because the model cannot honour them.
        reports: what preparers of plugins did to the request, by name.
    """

    asked: GenerateRequest
    request: GenerateRequest
    model: LoadedModel
    model_profile: ModelProfile
    parameters: Parameters
    prompt: Prompt
    prediction_token_ids: Sequence[int] | None = None
    unsupported: tuple[str, ...] = ()
    reports: Reports


def engine_request(prepared: Prepared, queue_s: float | None) -> EngineRequest:
    """Return the request for the engine; ``queue_s`` is the maximum time in its queue."""
    request, parameters, prompt = prepared.request, prepared.parameters, prepared.prompt
    plan = prompt.plan
    return EngineRequest(
        request_id=request.request_id,
        chat=_chat(request) if prompt.model.info.engine.takes_messages else None,
        segments=prompt.segments,
        token_ids=prompt.token_ids,
        add_special=prompt.add_special,
        num_prompt_logprobs=request.num_prompt_logprobs,
        num_choices=request.num_choices,
        sampling=parameters.sampling,
        stopping=parameters.stopping,
        shown_tokens=plan.shown_tokens if plan is not None else (),
        reasoning=prompt.reasoning,
        constraint=plan.constraint if plan is not None else request.constraint,
        prediction_token_ids=tuple(prepared.prediction_token_ids or ()),
        namespace=request.namespace,
        caller=request.caller,
        queue_timeout_s=queue_s,
        **request.options(),
    )


def _chat(request: GenerateRequest) -> Chat | None:
    """Return the chat as requested; None for a raw prompt."""
    if request.messages is None:
        return None
    return Chat(
        messages=request.messages,
        tool_use=request.tool_use,
        thinking=request.thinking,
        template_variables=request.template_variables,
    )
