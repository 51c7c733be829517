"""Error boundary for plugin calls while models and settings are planned; errors name the plugin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from enginehouse.contract.errors import EnginehouseError, PluginError

__all__ = ["plugin_guard"]

_log = logging.getLogger(__name__)


@contextmanager
def plugin_guard(called: str) -> Iterator[None]:
    """Convert unexpected exceptions in the block to PluginError; the traceback is logged.

    Args:
        called: the object that is called, such as ``the backend 'hf'``.
    """
    try:
        yield
    except EnginehouseError:
        raise
    except Exception as error:
        _log.error("%s failed", called, exc_info=error)
        raise PluginError(f"{called} failed: {type(error).__name__}: {error}") from error
