"""``/admin/requests``: what is running, and cancelling it. Prompts are shown only where the settings say so."""

from __future__ import annotations

from typing import Any

from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.admin.engine_views import Engines
from enginehouse.api.admin.running_requests import describe_answer, describe_partial, prompts_of
from enginehouse.api.http.body import read_empty_body
from enginehouse.api.http.caller import caller_of
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.open_answers import OpenAnswer, find_answer, list_answers

__all__ = ["request_routes"]


def request_routes(state: ApiState) -> list[HTTPRouteHandler]:
    """The routes below ``/admin/requests``."""
    engines, exchanges = Engines(state.manager, state.pipeline.replays), state.exchanges
    limit = state.settings.limits.max_body_bytes

    async def describe(answers: list[OpenAnswer], request: Request[Any, Any, Any]) -> list[dict[str, Any]]:
        models = {answer.record.model for answer in answers}
        views = await engines.views(caller_of(request.scope).name, models.__contains__)
        return [describe_answer(answer, views, engines.restarting()) for answer in answers]

    @get("/admin/requests")
    async def list_requests(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """List the generating requests that are running, the oldest first."""
        return {"object": "list", "data": await describe(list_answers(exchanges), request)}

    @get("/admin/requests/{request_id:str}")
    async def show_request(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show one running request."""
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        (shown,) = await describe([answer], request)
        return {**shown, "prompts": prompts_of(answer) if state.settings.server.show_prompts else None}

    @get("/admin/requests/{request_id:str}/partial")
    async def show_partial(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Show what a running request has said so far."""
        return describe_partial(find_answer(exchanges, str(request.path_params["request_id"])))

    @post("/admin/requests/{request_id:str}/cancel", status_code=200)
    async def cancel_request(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Cancel a running request; its client gets the error ``request_cancelled``."""
        await read_empty_body(request.receive, limit)
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        answer.cancel()
        return {"id": answer.id, "cancelled": True}

    @post("/admin/requests/{request_id:str}/stop-thinking", status_code=200)
    async def stop_thinking(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Close the reasoning of a running request, so that its answer follows."""
        await read_empty_body(request.receive, limit)
        answer = find_answer(exchanges, str(request.path_params["request_id"]))
        return {"id": answer.id, "choices_stopped": await answer.stop_thinking(engines.get)}

    return [list_requests, show_request, show_partial, cancel_request, stop_thinking]
