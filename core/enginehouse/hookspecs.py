"""Every hook, with its promise. A plugin implements any of them with ``@enginehouse.hookimpl``.

Hooks only collect: they run when the server starts (or per request, where said) and hand over plain
objects that core then calls directly. No hook runs inside the decode loop.

Every ``register_*`` hook also offers two arguments that an implementation may leave out, as pluggy allows:

``options``: the plugin's settings from ``[plugins.<name>]``, an instance of the attrs class that the plugin
holds as ``options``; None when it holds none.

``add_plugin(name, plugin)``: brings another plugin. The running round of calls does not see it; its own
register hooks are called in the next round, each exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

from enginehouse.backend import Backend, ModelSource
from enginehouse.commands import Command
from enginehouse.compression import Compressor
from enginehouse.drafting import Drafter
from enginehouse.early_exit import ExitPolicy
from enginehouse.events import ServerEvent
from enginehouse.identity import Credentials, Identity
from enginehouse.logits_processor import LogitsProcessor
from enginehouse.parsers import ReasoningParser, ToolParser
from enginehouse.router import Router
from enginehouse.sampler import SamplerPlugin
from enginehouse.structured import StructuredDecoder

__all__ = [
    "API_VERSION",
    "AddPlugin",
    "authenticate",
    "hookspec",
    "on_event",
    "register_backends",
    "register_commands",
    "register_compressors",
    "register_drafters",
    "register_exit_policies",
    "register_logits_processors",
    "register_model_sources",
    "register_reasoning_parsers",
    "register_routers",
    "register_samplers",
    "register_structured_decoders",
    "register_tool_parsers",
]

API_VERSION = 1
"""Version of the objects that hooks hand over; objects of this and the previous version are taken."""

AddPlugin = Callable[[str, object], None]
"""Called with a name that no plugin has and an object that implements hooks."""

hookspec = pluggy.HookspecMarker("enginehouse")


@hookspec
def register_backends(register: Callable[[Backend], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over the backends of this plugin.

    When: once at start, in the server process and again in each worker process; main thread.

    Args:
        register: call it once per backend object. A name that is taken is reported as a load error.
        options, add_plugin: see above; may be left out.

    A backend opens runners, which core's engine drives in a worker, or engines of its own, which live in the server
    process. An engine whose ``info.engine`` says ``takes_messages`` gets chats that are not rendered
    (:class:`enginehouse.types.Chat`) and reports reasoning and calls itself.

    An exception is recorded as this plugin's load error; the other plugins are not affected.

    Example::

        @enginehouse.hookimpl
        def register_backends(register):
            register(MyBackend())
    """


@hookspec
def register_model_sources(
    register: Callable[[str, Callable[[], ModelSource | None]], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Offer models that need no path, under a name.

    When: once at start, in the server process; main thread.

    Args:
        register: call it with a name and a function that finds the model now, or returns None when it is
            not installed. The function is called when that name is asked for; it must not load anything.
            The name ``starter`` is what ``enginehouse serve`` without arguments serves.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error; the other plugins are not affected.

    Example::

        @enginehouse.hookimpl
        def register_model_sources(register):
            register("starter", find_packaged_model)
    """


@hookspec
def register_samplers(register: Callable[[SamplerPlugin], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over sampling steps (penalties, a temperature, truncations) with the request fields that control them.

    When: once at start, in the server process (to validate request fields) and in each worker process
    (to sample); main thread.

    Args:
        register: call it once per sampler object. A name or request field that is taken is a load error.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error. An exception while sampling fails that request only
    and names the plugin.

    Example::

        @enginehouse.hookimpl
        def register_samplers(register):
            register(XtcSampler())
    """


@hookspec
def register_structured_decoders(
    register: Callable[[StructuredDecoder], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Hand over decoders that make answers follow a JSON Schema, a regular expression or a grammar.

    When: once at start, in the server process and again in each worker process, where it is bound to the
    model's tokenizer; main thread.

    Args:
        register: call it once per decoder object. A name that is taken is a load error. Where several decoders
            enforce the same kind of constraint, the first one registered serves it.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error. An exception while binding or compiling refuses the
    request, one while decoding fails it; a constrained request never goes on without its constraint.

    Example::

        @enginehouse.hookimpl
        def register_structured_decoders(register):
            register(MyDecoder())
    """


@hookspec
def register_logits_processors(
    register: Callable[[LogitsProcessor], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Hand over what changes rows of logits (see ``enginehouse.logits_processor``).

    When: once at start, in the server process and again in each worker process; main thread. For each sequence whose
    request sets one of a processor's fields, a session is made in the worker and called for each token, on the engine's
    thread.

    Args:
        register: call it once per processor object. Its ``request_fields`` become top-level request fields; a name
            that core or another plugin has is reported as a load error.
        options, add_plugin: see above; may be left out.

    An exception here is recorded as the plugin's load error. One in a session fails the request, naming the processor;
    the others of the batch go on.

    Example::

        @hookimpl
        def register_logits_processors(register):
            register(MyProcessor())
    """


@hookspec
def register_drafters(register: Callable[[Drafter], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over what proposes tokens that a model has not written yet (see ``enginehouse.drafting``).

    When: once at start, in the server process and again in each worker process; main thread. The drafters that the
    ``drafters`` of a model name are bound to it in its worker and asked before steps, on the engine's thread.

    Args:
        register: call it once per drafter object. A name that is taken is reported as a load error.
        options, add_plugin: see above; may be left out.

    An exception here is recorded as the plugin's load error. One in ``bind`` fails the load of the model, whose
    settings name the drafter. One while it proposes is logged, and the requests concerned go on without it: what is
    written never depends on a drafter.

    Example::

        @hookimpl
        def register_drafters(register):
            register(MyDrafter())
    """


@hookspec
def register_exit_policies(register: Callable[[ExitPolicy], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over what decides that a token may leave a model before its last layer (see ``enginehouse.early_exit``).

    When: once at start, in the server process and again in each worker process; main thread. The policy that
    ``exit_policy`` of a model names is bound to it in its worker and asked within forward passes, on the engine's
    thread.

    Args:
        register: call it once per policy object. A name that is taken is reported as a load error.
        options, add_plugin: see above; may be left out.

    An exception here is recorded as the plugin's load error. One in ``bind`` fails the load of the model whose settings
    name the policy. One while it decides, or an answer that is no mask of its rows, is logged, and the model runs all
    layers from then on.

    Example::

        @hookimpl
        def register_exit_policies(register):
            register(MyExitPolicy())
    """


@hookspec
def register_tool_parsers(register: Callable[[ToolParser], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over parsers that find the calls in what a model writes.

    When: once at start, in the server process and again in each worker process, which does not use them; main
    thread.

    Args:
        register: call it once per parser object. A name that is taken is a load error. A model is served by
            the parser that is surest of its chat template, of several the first one registered.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error. An exception while an answer is parsed is logged with
    the parser's name and the rest of that answer becomes text.

    Example::

        @enginehouse.hookimpl
        def register_tool_parsers(register):
            register(MyToolParser())
    """


@hookspec
def register_reasoning_parsers(
    register: Callable[[ReasoningParser], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Hand over parsers that tell a model's reasoning from its answer.

    When: once at start, in the server process and again in each worker process, which does not use them; main
    thread.

    Args:
        register: call it once per parser object. A name that is taken is a load error. A model is served by
            the parser that is surest of its chat template, of several the first one registered.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error. An exception while an answer is parsed fails that
    request only and names the parser.

    Example::

        @enginehouse.hookimpl
        def register_reasoning_parsers(register):
            register(MyReasoningParser())
    """


@hookspec
def register_routers(register: Callable[[Router], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over routers, which decide which models may answer a request for the model ``auto``, and in which order.

    When: once at start, in the server process and again in each worker process, which does not use them; main
    thread.

    Args:
        register: call it once per router object. A name that is taken is a load error. ``router.strategy`` in the
            settings names the one that is used.
        options, add_plugin: see above; may be left out.

    A router whose own settings name models, or depend on their number, has ``check_models`` as well (see
    ``enginehouse.router.ChecksModels``), which is called at the start where this router decides, and may raise
    ConfigError.

    An exception is recorded as this plugin's load error. An exception while deciding is logged with the router's name,
    and the default model is taken.

    Example::

        @enginehouse.hookimpl
        def register_routers(register):
            register(MyRouter())
    """


@hookspec
def register_compressors(register: Callable[[Compressor], None], options: Any, add_plugin: AddPlugin) -> None:
    """Hand over what makes prompts shorter (see ``enginehouse.compression``).

    When: once at start, in the server process and again in each worker process, which does not use them; main
    thread. A compressor is asked in the server process, before a prompt is rendered, on one of several threads that
    are there for this, so it may take its time and ask a model.

    Args:
        register: call it once per compressor object. A name that is taken is a load error. The ``compressor`` of a
            model, or a request's ``compression``, names the one that is used.
        options, add_plugin: see above; may be left out.

    An exception here is recorded as this plugin's load error. One while it compresses is logged with its name, and the
    prompt stays as it was.

    Example::

        @enginehouse.hookimpl
        def register_compressors(register):
            register(MyCompressor())
    """


@hookspec
def register_commands(register: Callable[[Command], None], options: Any, add_plugin: AddPlugin) -> None:
    """Add commands to ``enginehouse``.

    When: once at start of a command that is none of core's own, and of ``enginehouse --help``; also wherever the other
    hooks run, which does not use them. In the process of the command; main thread.

    Args:
        register: call it once per :class:`enginehouse.commands.Command`, which says where its click command is; that
            module is imported when the command is run. A name that is taken is a load error.
        options, add_plugin: see above; may be left out.

    An exception is recorded as this plugin's load error; the other plugins are not affected. An exception in the
    command is its own affair; an :class:`enginehouse.errors.EnginehouseError` is shown as one line.

    Example::

        @enginehouse.hookimpl
        def register_commands(register):
            register(Command("bench", "enginehouse_bench.command:bench", "Measure a running server under load."))
    """


@hookspec(firstresult=True)
def authenticate(credentials: Credentials, options: Any) -> Identity | None:
    """Say who sends a request, where its key is none of the server's own.

    When: once per request that needs a caller and brings no key of the settings or the key file, before its body is
    read; in the server process, on a thread of a pool, so it may block for a moment and may run on several threads at
    once. Only plugins that ``auth.authenticators`` lists are asked, in that order, until one answers.

    Args:
        credentials: the token, the headers and the peer's address of the request.
        options: the plugin's settings; may be left out.

    Return an :class:`enginehouse.identity.Identity`: a name, and what this caller may do. In the log and in limits the
    plugin's name stands before it, so it cannot be taken for another plugin's caller or for a key. None means that
    this plugin does not know the caller.

    An exception is logged with the plugin's name and the caller is refused, without asking further plugins; so is
    one whose answer is no Identity or has expired.

    Example::

        @enginehouse.hookimpl
        def authenticate(credentials):
            user = USERS.get(credentials.token)
            return None if user is None else Identity(name=user)
    """


@hookspec
def on_event(event: ServerEvent, options: Any) -> object:
    """Hear of what has happened: that the server started, that a request has ended, that a model changed.

    When: once per event, see :mod:`enginehouse.events`; the first is ``ServerStarted``, the last ``ServerStopped``. In
    the server process, on a thread that this plugin has for itself: it may block, and no request waits for it. Events
    come one after the other, in their order. Those of which 10,000 wait already are dropped and counted.

    Args:
        event: a value; what it is made of is over.
        options: see above; may be left out.

    Return False for the first event to hear no others; what else is returned is not looked at.

    An exception drops the event and is counted in ``enginehouse_dropped_events_total``; it is logged at most once a
    minute.

    Example::

        @enginehouse.hookimpl
        def on_event(event):
            print(event)
    """
