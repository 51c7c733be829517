"""Hook specifications. A plugin implements any of these hooks with ``@enginehouse.hookimpl``.

``register_*`` hooks run once, at start, and register plain objects, which core then calls directly. ``authenticate``
runs per request, ``on_event`` per event. An implementation may omit any argument. The following applies to every
``register_*`` hook.

When: once in each process that loads plugins, at its start and on its main thread: the server process, each worker
process, and commands that need plugins. Unless stated otherwise, the objects are used in the server process.

Args:
    register: call it once per object. An object that is incomplete, has an unknown ``api_version`` or a name that is
        already in use is refused and recorded as a load error; the plugin's other objects stay.
    options: the plugin's settings from ``[plugins.<name>]``, an instance of the attrs class in the plugin's attribute
        ``options``; None without that attribute.
    add_plugin: call it with a name and a plugin to add a further plugin. Its hooks are called after the current ones
        have finished, each once.

A worker process calls only the hooks of objects that work there: backends, samplers, logits processors, structured
decoders, drafters and exit policies; add a plugin that has such objects in one of these hooks. Import what a hook
registers inside the hook, so that other processes start faster.

An exception in the hook is recorded as the plugin's load error; other plugins are not affected.

Errors of registered objects: any exception, ``SystemExit`` included, and any result of a wrong type is counted in
``enginehouse_plugin_failures_total``. The log has its traceback once per object, method and minute. Where a request
fails, its client sees the plugin's name and what was wrong with a result, never an exception. Errors of
:class:`~enginehouse.contract.errors.RequestError` and its subclasses are the client's mistake: a 400 with its
``param``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pluggy

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.commands import Command
from enginehouse.contract.compressor import Compressor
from enginehouse.contract.drafter import Drafter
from enginehouse.contract.exit_policy import ExitPolicy
from enginehouse.contract.identity import Credentials, Identity
from enginehouse.contract.logits_processor import LogitsProcessor
from enginehouse.contract.model_hub import ModelHub
from enginehouse.contract.page import Page
from enginehouse.contract.parsers import ReasoningParser, ToolParser
from enginehouse.contract.preparer import Preparer
from enginehouse.contract.router import Router
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.server_events import ServerEvent
from enginehouse.contract.structured import StructuredDecoder
from enginehouse.contract.surface import Surface

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
    "register_model_hubs",
    "register_model_sources",
    "register_pages",
    "register_preparers",
    "register_reasoning_parsers",
    "register_routers",
    "register_samplers",
    "register_structured_decoders",
    "register_surfaces",
    "register_tool_parsers",
]

API_VERSION = 1
"""Version of the registered objects; objects of this and the previous version are accepted."""

AddPlugin = Callable[[str, object], None]
"""Called with a name that no plugin has and an object that implements hooks."""

hookspec = pluggy.HookspecMarker("enginehouse")
"""Marks a function as the specification of a hook."""


@hookspec
def register_backends(register: Callable[[Backend], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register backends, which open models.

    A backend opens either a model (a runner or a pooler), which core's engine drives in a worker process, or an engine
    of its own, which lives in the server process, on an event loop of its own. An engine with ``takes_messages`` in its
    ``info.engine`` gets unrendered chats (:class:`.Chat`), and reports reasoning and tool calls itself.

    An exception in ``open`` fails the load of that model. After one in a forward pass, its sequences are run one by
    one, and the requests of those that fail again fail. A runner that ends its process, or does not return within
    ``step_timeout_s``, ends its worker; its requests continue in the next worker, except those that were in two such
    calls, which fail with the plugin's name. An engine that blocks its event loop for longer than
    ``limits.plugin_timeout_s`` is given up, and opened again.

    Example::

        @enginehouse.hookimpl
        def register_backends(register):
            register(MyBackend())
    """


@hookspec
def register_model_sources(
    register: Callable[[str, Callable[[], ModelSource | None]], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Register named model sources, for models that need no path.

    Args:
        register: call it with a name and a function that finds the model, or returns None if it is not installed. The
            function is called when a user asks for that name; it must not load anything. ``enginehouse serve`` without
            arguments serves the name ``starter``, and names that begin with ``starter-``.

    An exception in the function fails the load of that model.

    Example::

        @enginehouse.hookimpl
        def register_model_sources(register):
            register("starter", find_packaged_model)
    """


@hookspec
def register_model_hubs(register: Callable[[ModelHub], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register model hubs, whose models users name by ids such as ``owner/name``.

    A text that is neither an offered name nor an existing path belongs to the first hub whose ``matches`` is true. A
    hub finds what is downloaded; it downloads only when the server starts with ``server.pull``, never for a request.

    An exception in a hub fails the load of that model.

    Example::

        @enginehouse.hookimpl
        def register_model_hubs(register):
            register(HuggingFaceHub())
    """


@hookspec
def register_samplers(register: Callable[[SamplerPlugin], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register sampling steps (penalties, a temperature, truncations) with the request fields that control them.

    The server process validates the request fields; the steps run in worker processes, on the engine's thread. A
    request field that core or another plugin already defines is a load error.

    An exception while sampling fails that request only and names the sampler.

    Example::

        @enginehouse.hookimpl
        def register_samplers(register):
            register(XtcSampler())
    """


@hookspec
def register_structured_decoders(
    register: Callable[[StructuredDecoder], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Register decoders, which make answers follow a JSON Schema, a regular expression or a grammar.

    A decoder is bound to the model's tokenizer in each worker process. If several decoders enforce the same kind of
    constraint, the first one serves it: Enginehouse's own, then by plugin name. Exclude another one with
    ``plugins.deny``.

    An exception while binding or compiling refuses the request, one while decoding fails it; a constrained request
    never continues without its constraint.

    Example::

        @enginehouse.hookimpl
        def register_structured_decoders(register):
            register(MyDecoder())
    """


@hookspec
def register_logits_processors(
    register: Callable[[LogitsProcessor], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Register logits processors, which change rows of logits (see ``enginehouse.contract.logits_processor``).

    The ``request_fields`` of a processor become top-level request fields; one that core or another plugin already
    defines is a load error. For each sequence whose request sets one of them, the worker process creates a session,
    which the engine's thread calls for each token.

    An exception in a session fails that request only and names the processor.

    Example::

        @enginehouse.hookimpl
        def register_logits_processors(register):
            register(MyProcessor())
    """


@hookspec
def register_drafters(register: Callable[[Drafter], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register drafters, which propose tokens for speculative decoding (see ``enginehouse.contract.drafter``).

    The drafters that a model's ``drafters`` setting names are bound to it in its worker process and called before
    steps, on the engine's thread.

    An exception in ``bind`` fails the load of the model. One in ``propose`` is logged, and the requests concerned
    continue without the drafter; the text never depends on a drafter.

    Example::

        @enginehouse.hookimpl
        def register_drafters(register):
            register(MyDrafter())
    """


@hookspec
def register_exit_policies(register: Callable[[ExitPolicy], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register exit policies, which let a token exit a model before its last layer (see ``exit_policy``).

    The policy that a model's ``exit_policy`` setting names is bound to it in its worker process and called during
    forward passes, on the engine's thread.

    An exception in ``bind`` fails the load of the model. One in a decision, or a result that is not a mask of the rows,
    is logged, and from then on the model runs all layers.

    Example::

        @enginehouse.hookimpl
        def register_exit_policies(register):
            register(MyExitPolicy())
    """


@hookspec
def register_tool_parsers(register: Callable[[ToolParser], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register tool parsers, which find the tool calls in a model's output.

    The parser with the highest ``match`` for the model's chat template serves it. On a tie: Enginehouse's own first,
    then by plugin name.

    An exception while parsing is logged with the parser's name. Outside a call, the rest of the answer becomes text,
    tags and held-back text included, and the client gets no error. Inside a call, the request fails with an error that
    names the parser. The same happens after a call of a session that takes longer than ``limits.plugin_timeout_s``;
    one of the format then fails the request.

    Example::

        @enginehouse.hookimpl
        def register_tool_parsers(register):
            register(MyToolParser())
    """


@hookspec
def register_reasoning_parsers(
    register: Callable[[ReasoningParser], None], options: Any, add_plugin: AddPlugin
) -> None:
    """Register reasoning parsers, which separate a model's reasoning from its answer.

    The parser with the highest ``match`` for the model's chat template serves it. On a tie: Enginehouse's own first,
    then by plugin name.

    An exception while parsing, and a call that takes longer than ``limits.plugin_timeout_s``, fails that request only,
    with an error that names the parser; in a stream, after the text that was sent.

    Example::

        @enginehouse.hookimpl
        def register_reasoning_parsers(register):
            register(MyReasoningParser())
    """


@hookspec
def register_routers(register: Callable[[Router], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register routers, which choose and order the models that may answer a request for the model ``auto``.

    The setting ``router.strategy`` names the router in use. A router whose settings name models, or depend on their
    number, also has ``check_models`` (see ``ChecksModels``), which is called once at start if that router is in use,
    and may raise ConfigError.

    An exception while routing is logged with the router's name, and the default model answers; likewise after a call
    that takes longer than ``limits.plugin_timeout_s``.

    Example::

        @enginehouse.hookimpl
        def register_routers(register):
            register(MyRouter())
    """


@hookspec
def register_compressors(register: Callable[[Compressor], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register compressors, which shorten prompts (see ``enginehouse.contract.compressor``).

    The plugin ``compress`` uses them: a model's ``compressor`` setting, or the ``compression`` of a request, names the
    one in use. It is called before the prompt is rendered, on one of several threads for this purpose, so it may block
    and ask a model: for scores, or for embeddings if it has the attribute ``needs_embeddings``.

    An exception while compressing is logged with the compressor's name, and the prompt stays uncompressed.

    Example::

        @enginehouse.hookimpl
        def register_compressors(register):
            register(MyCompressor())
    """


@hookspec
def register_surfaces(register: Callable[[Surface], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register surfaces, the APIs that clients speak (see ``enginehouse.contract.surface``).

    The setting ``server.surfaces`` names those that are on; all are by default. Core serves the routes of a surface,
    with keys, limits, queues, cancellation, metrics and the log. Two surfaces with one address stop the start, unless
    the routes of one of them need a header.

    ``requests``, ``assemble`` and ``handle`` of a route are called once per request, the methods of an assembler for
    each piece of its output. Functions run in threads of the plugin, coroutines on event loops of the plugin, of which
    there are several: other requests do not wait for them. An exception in them, and a call that blocks for longer than
    ``limits.plugin_timeout_s``, fails that request only and names the surface.

    Example::

        @enginehouse.hookimpl
        def register_surfaces(register):
            register(MySurface())
    """


@hookspec
def register_pages(register: Callable[[Page], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register pages: folders of static files, served at ``/ui/<name>/`` unless ``server.ui`` is off.

    The files are read when the server starts and at a reload. A page runs in browsers and uses the public API with the
    key of its user. ``/`` and ``/ui/`` lead to the first page: Enginehouse's own, then by plugin name.

    An exception while the files are read leaves the page out and is logged.

    Example::

        @enginehouse.hookimpl
        def register_pages(register):
            register(Page("console", Path(__file__).parent / "page"))
    """


@hookspec
def register_preparers(register: Callable[[Preparer], None], options: Any, add_plugin: AddPlugin) -> None:
    """Register preparers, which change requests before their prompts are rendered (see ``preparer``).

    A preparer is bound to the settings of the models once per configuration. Its ``prepare_request`` is called for each
    request, on an event loop of the plugin, and a second time with the number of tokens that must go if the prompt
    turns out to be too long. What it did is shown in the details of the response.

    An exception in ``prepare_request``, and one that blocks for longer than ``limits.plugin_timeout_s``, fails that
    request only and names the preparer.

    Example::

        @enginehouse.hookimpl
        def register_preparers(register):
            register(MyPreparer())
    """


@hookspec
def register_commands(register: Callable[[Command], None], options: Any, add_plugin: AddPlugin) -> None:
    """Add commands to ``enginehouse``.

    The hook also runs for ``enginehouse --help``, which imports no command: a ``Command`` contains the location of the
    click command, whose module is imported to run it, in the process of the command line.

    An exception in the command propagates to the user; an ``EnginehouseError`` is shown as one line.

    Example::

        @enginehouse.hookimpl
        def register_commands(register):
            register(Command("bench", "enginehouse_bench.command:bench", "Measure a running server under load."))
    """


@hookspec(firstresult=True)
def authenticate(credentials: Credentials, options: Any) -> Identity | None:
    """Identify the caller of a request without one of the server's own keys.

    When: once per request that needs a caller and has no key of the settings or the key file, before its body is read.
    In the server process, on up to 8 threads of this plugin, concurrently: it may block, but a call that takes longer
    than ``auth.timeout_s`` is abandoned. The plugins that ``auth.authenticators`` lists are asked in that order until
    one answers.

    Args:
        credentials: the token, the headers and the peer's address of the request.
        options: the plugin's settings, as above.

    Returns:
        The caller's name and permissions, or None if the plugin does not know the caller. Logs and limits show the name
        after the plugin's name, so it cannot be mistaken for a key or another plugin's caller.

    An exception in it, a result that is not a valid Identity or has expired, and an abandoned call refuse the caller
    with 503, which may be repeated; further plugins are not asked.

    Example::

        @enginehouse.hookimpl
        def authenticate(credentials):
            user = USERS.get(credentials.token)
            return None if user is None else Identity(name=user)
    """


@hookspec
def on_event(event: ServerEvent, options: Any) -> object:
    """Receive every server event: server start and stop, request end, model state change.

    When: once per event (see ``server_events``), from ``ServerStarted`` to ``ServerStopped``, in order. In the server
    process, on a thread of its own per plugin: it may block, and no request waits for it. Once 10,000 events are
    waiting, further ones are dropped and counted.

    Args:
        event: an immutable snapshot; nothing in it changes later.
        options: the plugin's settings, as above.

    Returns:
        False for the first event unsubscribes the plugin; any other result is ignored.

    An exception drops the event and is counted in ``enginehouse_dropped_events_total``; it is logged at most once a
    minute.

    Example::

        @enginehouse.hookimpl
        def on_event(event):
            print(event)
    """
