"""The router ``minimal_by_length``: short prompts go to the first model, long ones to the last."""

from __future__ import annotations

from enginehouse.contract.router import Attempt, RouteQuestion, RoutingDecision

__all__ = ["LengthRouter"]

_LONG_CHARS = 200


class LengthRouter:
    """Implements :class:`enginehouse.contract.router.Router`."""

    name = "minimal_by_length"
    api_version = 1

    def route(self, question: RouteQuestion) -> RoutingDecision:
        """All candidates: weakest first for a short prompt, strongest first for a long one."""
        request = question.request
        num_chars = len(request.text or "") + sum(len(message.content) for message in request.messages or ())
        is_long = num_chars > _LONG_CHARS
        ordered = sorted(question.candidates, key=lambda candidate: candidate.rank, reverse=is_long)
        return RoutingDecision(attempts=tuple(Attempt(one.name) for one in ordered), reason=f"{num_chars} characters")
