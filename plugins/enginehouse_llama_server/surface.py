"""The surface ``llama_server``: completions, infill, properties, slots and control of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import InvalidRequest, quoted
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.surface import SSE, Answer, ErrorAnswer, GenerationRoute, Reply, ReplyRoute, Route
from enginehouse.contract.types import GenerateRequest
from enginehouse_llama_server.answers import CompletionAssembler, error_body
from enginehouse_llama_server.bodies import CompletionBody, ControlBody, InfillBody
from enginehouse_llama_server.requests import completion_requests, has_many, infill_requests, read_prompts
from enginehouse_llama_server.settings import generation_settings

__all__ = ["LlamaServerSurface"]

_FRAME = evolve(SSE, last=b"")
"""These streams end without ``[DONE]``: their last event has ``"stop": true``."""


async def _assemble(call: Call, answer: Answer) -> CompletionAssembler:
    """Return the writer; prompts of token ids are shown as texts."""
    body = call.body
    if isinstance(body, InfillBody):
        return CompletionAssembler(call, answer, [body.input_prefix + body.prompt], [None], is_many=False)
    texts: list[str] = []
    counts: list[int | None] = []
    for prompt in await read_prompts(call):
        token_ids = prompt.get("token_ids")
        texts.append(prompt["text"] if token_ids is None else await call.server.detokenize(token_ids, body.model))
        counts.append(None if token_ids is None else len(token_ids))
    is_many = has_many(body.prompt) or len(texts) * (body.n_cmpl or body.n or 1) > 1
    return CompletionAssembler(call, answer, texts, counts, is_many=is_many)


async def _props(call: Call) -> Reply:
    """``/props`` of a model, which ``?model=`` names; before its first load, many members are empty."""
    entry = call.server.model(call.query.get("model"))
    info = entry.info
    parameters = generation_settings(call.server.defaults(entry.name), stream=True, n_probs=0, grammar="")
    templates = info.chat_templates if info is not None else {}
    tool_use = {"chat_template_tool_use": templates["tool_use"]} if "tool_use" in templates else {}
    return Reply(
        {
            "default_generation_settings": {"params": parameters, "n_ctx": info.max_context if info is not None else 0},
            "total_slots": max(1, len(_of_model(await call.server.requests(), entry.name))),
            "model_alias": entry.name,
            "model_ftype": entry.quantization or "",
            "model_path": "",
            "modalities": {
                "vision": info is not None and "image" in info.engine.media,
                "video": False,
                "audio": info is not None and "audio" in info.engine.media,
            },
            "endpoint_slots": True,
            "endpoint_props": False,
            "chat_template": templates.get("default", ""),
            **tool_use,
            "bos_token": info.bos_token if info is not None else "",
            "eos_token": info.eos_token if info is not None else "",
            "build_info": entry.fingerprint or "",
            "is_sleeping": entry.state != "ready",
        }
    )


async def _slots(call: Call) -> Reply:
    """``/slots``: one entry per running choice that the caller may see, otherwise one that is idle."""
    entry = call.server.model(call.query.get("model"))
    n_ctx = entry.info.max_context if entry.info is not None else 0
    running = [
        (request, choice)
        for request in _of_model(await call.server.requests(), entry.name)
        for choice in request["choices"]
    ]
    slots = [_slot(number, n_ctx, request, choice) for number, (request, choice) in enumerate(running)]
    return Reply(slots or [{"id": 0, "n_ctx": n_ctx, "speculative": False, "is_processing": False}])


async def _adapters(call: Call) -> Reply:
    """``/lora-adapters``: the adapters of a model with their ids; ``path`` is the name, as no path is told."""
    entry = call.server.model(call.query.get("model"))
    ids = entry.adapter_ids
    return Reply([{"id": ids[name], "path": name, "scale": scale} for name, scale in entry.adapters.items()])


def _of_model(requests: Sequence[Mapping[str, Any]], model: str) -> list[Mapping[str, Any]]:
    return [request for request in requests if request["model"] in (model, None)]


def _slot(number: int, n_ctx: int, request: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    cached = request["cached_tokens"] or 0
    return {
        "id": number,
        "id_task": request["id"],
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": choice["phase"] in ("prefill", "decode"),
        "n_prompt_tokens": request["prompt_tokens"] or 0,
        "n_prompt_tokens_processed": max(0, (choice["kv_tokens"] or 0) - cached),
        "n_prompt_tokens_cache": cached,
        "next_token": [
            {"has_next_token": choice["finish_reason"] is None, "n_decoded": choice["completion_tokens"] or 0}
        ],
    }


async def _control(call: Call) -> Reply:
    """End the reasoning of a running request of the caller."""
    if call.body.action != "reasoning_end":
        raise InvalidRequest(f"action: must be 'reasoning_end', not {quoted(call.body.action)}", "action")
    return Reply({"success": await call.server.stop_thinking(call.body.id) > 0})


def _generation(
    path: str, name: str, body: type[Any], requests: Callable[[Call], Awaitable[list[GenerateRequest]]], summary: str
) -> GenerationRoute:
    return GenerationRoute(
        path=path, name=name, summary=summary, body=body, requests=requests, assemble=_assemble, frame=_FRAME
    )


def _routes() -> list[Route]:
    get = ReplyRoute(
        method="GET", path="/props", name="llama_props", summary="Properties of a model", limits=None, handle=_props
    )
    return [
        _generation("/completion", "llama_completion", CompletionBody, completion_requests, "Continue texts"),
        _generation("/infill", "llama_infill", InfillBody, infill_requests, "Fill the gap between two texts"),
        get,
        evolve(get, path="/lora-adapters", name="llama_adapters", summary="Adapters of a model", handle=_adapters),
        evolve(get, path="/slots", name="llama_slots", summary="The caller's running requests", handle=_slots),
        ReplyRoute(
            path="/v1/chat/completions/control",
            name="llama_control",
            summary="End the reasoning of a running request",
            body=ControlBody,
            limits=None,
            handle=_control,
        ),
    ]


class LlamaServerSurface:
    """The API of llama.cpp's server beside OpenAI's."""

    name = "llama_server"
    api_version = API_VERSION
    request_id_header = None
    takes_any_type = False

    def __init__(self) -> None:
        self.routes: Sequence[Route] = _routes()

    def error(self, error: ErrorAnswer) -> Reply:
        """Return llama-server's error object."""
        return Reply(error_body(error))
