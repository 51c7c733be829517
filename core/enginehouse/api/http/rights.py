"""What a caller may ask for and see beyond the scopes of addresses: which models, how urgently, and whose prompts.

A model that a caller may not use does not exist for it: it is answered like any unknown name, so that nobody learns
what else is served.
"""

from __future__ import annotations

from enginehouse.api.http.caller import Caller
from enginehouse.contract.errors import InvalidRequest, ModelNotFound
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.settings.config import ServerSettings

__all__ = ["check_model", "check_priority", "may_see_prompts", "may_use", "shown_as"]


def may_use(caller: Caller, name: str, asked: str | None = None) -> bool:
    """Whether a caller may use the model ``name`` when it asks for it as ``asked``.

    A list that holds a model's name allows its aliases as well; one that holds an alias allows that alias only.
    """
    allowed = caller.key.models if caller.key is not None else None
    return allowed is None or name in allowed or asked in allowed


def check_model(caller: Caller, asked: str | None, manager: ModelManager) -> None:
    """Refuse a model that the caller may not use, before anything is loaded for it.

    Raises:
        ModelNotFound: there is no such model for this caller.
    """
    if caller.key is not None and caller.key.models is not None:
        model = manager.find(asked)
        if not may_use(caller, model.name, asked):
            raise ModelNotFound(asked or model.name)


def shown_as(caller: Caller, status: ModelStatus) -> list[str]:
    """The names by which a caller may ask for a model, the one that it is listed by first; none where it may not."""
    return [name for name in (status.name, *status.aliases) if may_use(caller, status.name, name)]


def may_see_prompts(caller: Caller, server: ServerSettings, *, is_local: bool) -> bool:
    """Whether a caller may see text of other requests: if the operator allows it, those to whom ``/admin`` is open."""
    return server.show_prompts and (is_local if caller.key is None else "admin" in caller.key.scopes)


def check_priority(caller: Caller, priority: int) -> None:
    """Refuse a priority that is more urgent than the caller's key allows.

    Raises:
        InvalidRequest: names the field.
    """
    if caller.key is not None and priority < caller.key.priority:
        message = f"priority: this key may ask for {caller.key.priority} or more, not {priority}"
        raise InvalidRequest(message, "priority")
