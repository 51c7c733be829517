"""The page of Enginehouse at ``/ui/console/``. Hook implementations only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.page import Page

__all__ = ["register_pages"]


@hookimpl
def register_pages(register: Callable[[Page], None]) -> None:
    """Register the page ``console``."""
    from enginehouse_ui.console import CONSOLE

    register(CONSOLE)
