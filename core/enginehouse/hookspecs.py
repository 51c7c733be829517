"""Every hook, with its promise. A plugin implements any of them with ``@enginehouse.hookimpl``.

Hooks only collect: they run when the server starts (or per request, where said) and hand over plain
objects that core then calls directly. No hook runs inside the decode loop.
"""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from enginehouse.backend import Backend, ModelSource
from enginehouse.sampler import SamplerPlugin

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("enginehouse")
hookimpl = pluggy.HookimplMarker("enginehouse")


@hookspec
def register_backends(register: Callable[[Backend], None]) -> None:
    """Hand over the backends of this plugin.

    When: once at start, in the server process and again in each worker process; main thread.

    Args:
        register: call it once per backend object. A name that is taken is reported as a load error.

    An exception is recorded as this plugin's load error; the other plugins are not affected.

    Example::

        @enginehouse.hookimpl
        def register_backends(register):
            register(MyBackend())
    """


@hookspec
def register_model_sources(register: Callable[[str, Callable[[], ModelSource | None]], None]) -> None:
    """Offer models that need no path, under a name.

    When: once at start, in the server process; main thread.

    Args:
        register: call it with a name and a function that finds the model now, or returns None when it is
            not installed. The function is called when that name is asked for; it must not load anything.
            The name ``starter`` is what ``enginehouse serve`` without arguments serves.

    An exception is recorded as this plugin's load error; the other plugins are not affected.

    Example::

        @enginehouse.hookimpl
        def register_model_sources(register):
            register("starter", find_packaged_model)
    """


@hookspec
def register_samplers(register: Callable[[SamplerPlugin], None]) -> None:
    """Hand over truncation steps (such as XTC) together with the request fields that control them.

    When: once at start, in the server process (to validate request fields) and in each worker process
    (to sample); main thread.

    Args:
        register: call it once per sampler object. A name or request field that is taken is a load error.

    An exception is recorded as this plugin's load error. An exception while sampling fails that request only
    and names the plugin.

    Example::

        @enginehouse.hookimpl
        def register_samplers(register):
            register(XtcSampler())
    """
