"""The border to a plugin that is asked something while models and settings are planned: mistakes are told by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from enginehouse.contract.errors import EnginehouseError, PluginError

__all__ = ["plugin_border"]

_log = logging.getLogger(__name__)


@contextmanager
def plugin_border(called: str) -> Iterator[None]:
    """While the block runs, what nobody raised on purpose becomes a PluginError; the log has its traceback.

    Args:
        called: what is asked, such as ``the backend 'hf'``.
    """
    try:
        yield
    except EnginehouseError:
        raise
    except Exception as error:
        _log.error("%s failed", called, exc_info=error)
        raise PluginError(f"{called} failed: {type(error).__name__}: {error}") from error
