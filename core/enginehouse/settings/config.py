"""Settings: one frozen value built from defaults, a TOML file, the environment and the command line.

Later sources override earlier ones: built-in defaults, ``enginehouse.toml``, variables such as
``ENGINEHOUSE_SERVER__PORT=8081``, and the command line (``overrides``). Unknown keys and wrong types are errors that
name the setting. This module does not know the options of backends and plugins: it keeps those keys as plain data until
:func:`structure_options` reads them with the owner's own class.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import attrs
from attrs import evolve, field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.converter import settings_converter
from enginehouse.settings.features import (
    AdapterSettings,
    DrafterSettings,
    ExitPolicySettings,
    MediaSettings,
    RouterSettings,
    check_adapters,
)
from enginehouse.settings.limits import ByteCount, LimitsSettings, Timeouts
from enginehouse.settings.presets import ModelPresets, add_found, matches, take_presets
from enginehouse.settings.reload import LIVE, SERVER, WORKER, WORKER_ONLY
from enginehouse.settings.server import ServerSettings, is_loopback
from enginehouse.settings.structuring import Problem, closest, converting, noun_of

__all__ = [
    "AuthSettings",
    "LimitsSettings",
    "MediaSettings",
    "ModelSettings",
    "PluginsSettings",
    "ServerSettings",
    "Settings",
    "is_loopback",
    "load_settings",
    "matches",
    "new_model",
    "structure_options",
]

_PREFIX = "ENGINEHOUSE_"
_T = TypeVar("_T")

_USUAL_DISK, _USUAL_EMBEDDINGS = ByteCount(2 * 2**30), ByteCount(256 * 2**20)


@frozen(kw_only=True)
class ModelSettings:
    """``[models.<name>]``: one served model. Further keys of the table are options of its backend.

    Attributes:
        source: path of a model file or folder, the id of a downloaded model, the address of a server, or the name of a
            model source that a plugin offers. A path may be relative to the configuration file.
        backend: name of the backend; unset selects the best match for the source.
        context: longest sequence (prompt plus answer) in tokens; unset is the backend's choice.
        slots: sequences that decode concurrently.
        prefill_chunk_tokens: maximum prompt tokens in a step in which other sequences decode; unset is the backend's
            choice.
        prefix_cache: keep finished sequences for requests with the same prefix.
        prefix_cache_dir: folder in which they are also saved, so that they survive a restart; a relative name is
            relative to the configuration file. The saved data is as confidential as the prompts; unset saves nothing.
        prefix_cache_disk: maximum size of this model's files there, in bytes or like ``"2GiB"``.
        isolation: ``process`` runs the model in a separate worker process, ``thread`` in the server process.
        python: Python executable of the worker process's virtual environment; unset is the server's own.
        step_timeout_s: time limit in seconds for a forward pass, or for tokenizing one prompt; a worker that exceeds it
            is killed and restarted, at the latest after 1.75 times the limit. 0 means no limit.
        load_timeout_s: maximum time in seconds without load progress; then the worker is killed and the load fails. 0
            means no limit.
        replay: resume running requests when their worker dies; otherwise they end with an error.
        replay_timeout_s: maximum time in seconds that a request waits for its worker to restart before it ends with an
            error.
        aliases: alternative names of this model. ``*`` in a name matches any characters, so that ``claude-*`` is
            every name that begins so; names without one take precedence, then the first model in the file.
        defaults: default values of request fields, such as ``temperature``.
        alias_defaults: alias to default values for requests by that alias; they override ``defaults``.
        generation_config: use the recommendations of the model's own files (``generation_config.json``,
            ``general.sampling`` keys of GGUF), overridden by ``defaults``.
        chat_template: file with a Jinja chat template to use instead of the model's own.
        tool_parser: name of the tool parser; unset selects the best match for the chat template.
        reasoning_parser: name of the reasoning parser; unset selects the best match, ``none`` disables it.
        drafters: drafters for speculative decoding, in order of preference, each a name or a table with its settings;
            unset is ``prediction`` if that drafter is installed.
        exit_policy: policy for early exit of confident tokens before the last layer, a name or a table with its
            settings. This changes the generated text; unset runs all layers.
        adapters: adapters (LoRA) of the model, by name; a request names one as ``model: "x:name"`` or in ``adapters``.
        adapter_folders: folders below which adapters may be added at run time, each like ``prefix_cache_dir``.
        max_adapters: adapters that are loaded at once; then the least recently used one is unloaded.
        embedding_cache: memory for embeddings of images that later requests may use, like ``"64MiB"``; 0 keeps none.
        compressor: prompt compression: the name of a method, or a table; the plugin ``compress`` reads it.
        pooling_cache: memory for rows of texts that a pooling model has computed, like ``"64MiB"``; unset keeps none.
        rerank: lets a model that is not a reranker answer rerank requests: ``cosine`` compares the embeddings of a
            model for embeddings, ``yes_no`` asks a generative model for one word and compares its logits.
        rerank_template: prompt for ``yes_no``, with ``{query}`` and ``{document}``; unset is the model's own template
            ``rerank``, or that of Qwen3-Reranker.
        rerank_answers: the two words for ``yes_no``: of a relevant document, and of another one.
        load: ``eager`` loads it when the server starts, if ``limits.memory_budget`` allows, ``lazy`` with a request.
        pin: never unload it to make room for another model.
        ttl: idle time in seconds after which it is unloaded; unset is never.
        draining: new requests while it is being unloaded for another model: ``wait`` holds them until it is loaded
            again, ``serve`` continues to serve them, so it is unloaded only once it has no requests.
        queue_timeout_s: overrides ``limits.queue_timeout_s``; the following two likewise.
        first_token_timeout_s: overrides ``limits.first_token_timeout_s``.
        total_timeout_s: overrides ``limits.total_timeout_s``.
        options: keys of the table that are not listed above; the backend's options class reads them.
        origin: ``settings``, ``folder`` (found in ``server.models_dir``) or ``added`` (by an administrator, while the
            server runs). The file cannot set it.
    """

    source: str = field(metadata=WORKER)
    backend: str | None = field(default=None, metadata=WORKER)
    context: int | None = field(default=None, validator=optional(gt(0)), metadata=WORKER)
    slots: int = field(default=8, validator=gt(0), metadata=WORKER)
    prefill_chunk_tokens: int | None = field(default=None, validator=optional(gt(0)), metadata=WORKER | WORKER_ONLY)
    prefix_cache: bool = field(default=True, metadata=WORKER | WORKER_ONLY)
    prefix_cache_dir: str | None = field(default=None, metadata=WORKER)
    prefix_cache_disk: ByteCount = field(default=_USUAL_DISK, metadata=WORKER)
    isolation: Literal["process", "thread"] = field(default="process", metadata=WORKER | WORKER_ONLY)
    python: str | None = field(default=None, metadata=WORKER | WORKER_ONLY)
    step_timeout_s: float = field(default=300.0, validator=ge(0), metadata=WORKER | WORKER_ONLY)
    load_timeout_s: float = field(default=900.0, validator=ge(0), metadata=LIVE)
    replay: bool = field(default=True, metadata=LIVE | WORKER_ONLY)
    replay_timeout_s: float = field(default=300.0, validator=gt(0), metadata=LIVE | WORKER_ONLY)
    aliases: tuple[str, ...] = field(default=(), metadata=LIVE)
    defaults: dict[str, Any] = field(factory=dict, metadata=LIVE)
    alias_defaults: dict[str, dict[str, Any]] = field(factory=dict, metadata=LIVE)
    generation_config: bool = field(default=True, metadata=LIVE)
    chat_template: str | None = field(default=None, metadata=LIVE)
    tool_parser: str | None = field(default=None, metadata=LIVE)
    reasoning_parser: str | None = field(default=None, metadata=LIVE)
    drafters: tuple[DrafterSettings, ...] | None = field(default=None, metadata=WORKER | WORKER_ONLY)
    adapters: dict[str, AdapterSettings] = field(factory=dict, validator=check_adapters, metadata=WORKER)
    adapter_folders: tuple[str, ...] = field(default=(), metadata=LIVE | WORKER_ONLY)
    max_adapters: int = field(default=8, validator=ge(1), metadata=WORKER | WORKER_ONLY)
    embedding_cache: ByteCount = field(default=_USUAL_EMBEDDINGS, metadata=WORKER | WORKER_ONLY)
    compressor: Any = field(default=None, metadata=WORKER)
    exit_policy: ExitPolicySettings | None = field(default=None, metadata=WORKER)
    pooling_cache: ByteCount | None = field(default=None, metadata=WORKER | WORKER_ONLY)
    rerank: Literal["cosine", "yes_no"] | None = field(default=None, metadata=WORKER | WORKER_ONLY)
    rerank_template: str | None = field(default=None, metadata=WORKER | WORKER_ONLY)
    rerank_answers: tuple[str, str] = field(default=("yes", "no"), metadata=WORKER | WORKER_ONLY)
    load: Literal["eager", "lazy"] = field(default="eager", metadata=LIVE)
    pin: bool = field(default=False, metadata=LIVE)
    ttl: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    draining: Literal["wait", "serve"] = field(default="wait", metadata=LIVE)
    queue_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE | WORKER_ONLY)
    first_token_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    total_timeout_s: float | None = field(default=None, validator=optional(gt(0)), metadata=LIVE)
    options: dict[str, Any] = field(factory=dict, metadata=WORKER)
    origin: Literal["settings", "folder", "added"] = field(default="settings", metadata=LIVE)


_OWN = {attribute.name for attribute in attrs.fields(ModelSettings)} - {"options", "origin"}


@frozen(kw_only=True)
class PluginsSettings:
    """``[plugins]``: selection of plugins. ``[plugins.<name>]`` holds the options of one plugin.

    Attributes:
        allow: load only the plugins with these names; unset loads every installed one.
        deny: never import the plugins with these names.
        options: plugin name to its table; the plugin's options class reads it.
        folder: of the configuration file, to which paths in ``options`` are relative; empty without a file. The file
            cannot set it.
    """

    allow: tuple[str, ...] | None = field(default=None, metadata=SERVER)
    deny: tuple[str, ...] = field(default=(), metadata=SERVER)
    options: dict[str, dict[str, Any]] = field(factory=dict, metadata=SERVER)
    folder: str = field(default="", eq=False, metadata=SERVER)


@frozen(kw_only=True)
class Settings:
    """All settings; one attribute per table of ``enginehouse.toml``. A table with metadata changes as a whole.

    Attributes:
        presets: where ``models`` comes from, besides tables of models; computed, the file cannot set it.
    """

    server: ServerSettings = field(factory=ServerSettings)
    auth: AuthSettings = field(factory=AuthSettings)
    limits: LimitsSettings = field(factory=LimitsSettings)
    media: MediaSettings = field(factory=MediaSettings)
    models: dict[str, ModelSettings] = field(factory=dict)
    router: RouterSettings = field(factory=RouterSettings)
    plugins: PluginsSettings = field(default=PluginsSettings(), metadata=SERVER)
    presets: ModelPresets = field(factory=ModelPresets)

    def __attrs_post_init__(self) -> None:
        """Validate settings that depend on several tables."""
        is_near = (self.server.uds is not None and not self.server.extra_ports) or is_loopback(self.server.host)
        if not (is_near or self.auth.needs_key or self.server.insecure):
            raise ConfigError(
                f"{self.server.host!r} can be reached from other machines: set auth.keys or auth.key_file, "
                "or server.insecure = true (--insecure) to serve everyone",
                "server.host",
            )
        for path, name in self.router.named_models():
            if name not in self.models:
                raise ConfigError(f"{path}: no model {name!r} is served{closest(name, tuple(self.models))}", path)
        self._check_names()
        taken: dict[str, str] = dict.fromkeys(self.models, "a model of that name")
        for name, model in self.models.items():
            if model.pin and model.ttl is not None:
                raise ConfigError("a pinned model is never unloaded; remove pin or ttl", f"models.{name}.ttl")
            for alias in model.aliases:
                if alias in taken:
                    raise ConfigError(f"the alias {alias!r} is taken by {taken[alias]}", f"models.{name}.aliases")
                taken[alias] = f"the model {name!r}"
            for alias in model.alias_defaults:
                if alias not in model.aliases:
                    hint = closest(alias, model.aliases)
                    path = f"models.{name}.alias_defaults.{alias}"
                    raise ConfigError(f"the model has no alias {alias!r}{hint}", path)

    def _check_names(self) -> None:
        """Check that model names are printable: they appear in headers and log lines."""
        for name, model in self.models.items():
            for path, known in (("models", name), *((f"models.{name}.aliases", alias) for alias in model.aliases)):
                if not known.strip() or not known.isprintable():
                    raise ConfigError(f"{path}: a name must hold characters that can be printed, not {known!r}", path)

    def timeouts(self, model: ModelSettings) -> Timeouts:
        """Return the time limits for requests to a model: its own settings, else the server's."""
        limits = self.limits
        own = model.queue_timeout_s, model.first_token_timeout_s, model.total_timeout_s
        usual = limits.queue_timeout_s, limits.first_token_timeout_s, limits.total_timeout_s
        queue, first, total = [most if mine is None else mine for mine, most in zip(own, usual, strict=True)]
        return Timeouts(queue_s=queue, first_token_s=first, total_s=total)

    def served_names(self) -> tuple[str, ...]:
        """Return the names and aliases of all models."""
        return tuple(known for name, model in self.models.items() for known in (name, *model.aliases))


def load_settings(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Settings:
    """Read and validate the settings.

    Args:
        path: the TOML file, or None for none.
        env: environment variables; only ``ENGINEHOUSE_<TABLE>__<KEY>`` ones are used.
        overrides: table to key to value; overrides all other sources.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or invalid.
    """
    data = _read_toml(path) if path else {}
    where = f" (in {path})" if path else ""
    _merge(data, _from_environment(env, data), where)
    _merge(data, overrides or {}, where)
    if "presets" in data:
        raise ConfigError(f"presets: unknown setting{where}", "presets")
    folder = path.absolute().parent if path else None
    presets = take_presets(data)
    _check_presets(presets, where)
    found = add_found(data, _models_dirs(data, folder or Path.cwd(), where), presets)
    settings = _structure(Settings, _collect_options(data), "", where)
    in_folders = {model.name: evolve(settings.models[model.name], origin="folder") for model in found.models}
    models = {**settings.models, **in_folders}
    settings = evolve(settings, models=models, presets=evolve(presets, unserved=found.unserved))
    return _resolve_paths(settings, folder) if folder else settings


def new_model(settings: Settings, name: str, table: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of a model that an administrator adds to those of ``settings``, with their presets.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    model = _structure(ModelSettings, _split(settings.presets.table(name, table), _OWN), f"models.{name}", "")
    model = evolve(model, origin="added")
    return _resolve_model(model, Path(settings.plugins.folder)) if settings.plugins.folder else model


def _check_presets(presets: ModelPresets, where: str) -> None:
    """Check presets as the settings of a model, so that messages name them and not the models that they apply to."""
    tables = {"model_defaults": presets.defaults, **{f"models.{name}": one for name, one in presets.patterns.items()}}
    for path, table in tables.items():
        _structure(ModelSettings, {**_split(dict(table), _OWN), "source": "any"}, path, where)


def _models_dirs(data: dict[str, Any], folder: Path, where: str) -> list[Path]:
    """Return ``server.models_dir`` as absolute paths; one folder may be a string."""
    server = data.get("server")
    if not isinstance(server, dict) or "models_dir" not in server:
        return []
    if isinstance(server["models_dir"], str):
        server["models_dir"] = [server["models_dir"]]
    checked = _structure(ServerSettings, {"models_dir": server["models_dir"]}, "server", where)
    server["models_dir"] = [str(folder / Path(name).expanduser()) for name in checked.models_dir]
    return list(map(Path, server["models_dir"]))


def structure_options(
    cls: type[_T], data: Mapping[str, Any], path: str, also_known: tuple[str, ...] = (), folder: str = ""
) -> _T:
    """Read the options of a backend or plugin with its attrs class.

    Args:
        cls: the options class.
        data: the keys of the table that core does not own.
        path: dotted path of the table, for messages.
        also_known: names that core owns in the same table, suggested if a key is misspelt.
        folder: folder to which values of the type ``Path`` are relative; empty is the working folder.

    Raises:
        ConfigError: a key is unknown or has an invalid value.
    """
    known = tuple(attribute.name for attribute in attrs.fields(cls)) + also_known  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise ConfigError(f"{path}.{name}: unknown setting{closest(name, known)}", f"{path}.{name}")
    return _structure(cls, data, path, "", folder)


def _structure(cls: type[_T], data: Mapping[str, Any], path: str, where: str, folder: str = "") -> _T:
    def refuse(problems: Sequence[Problem]) -> ConfigError:
        # Users write the keys in ``options`` directly into the table.
        shown = [evolve(problem, path=problem.path.replace(".options.", ".", 1)) for problem in problems]
        return ConfigError("; ".join(map(str, shown)) + where, shown[0].path)

    with converting(refuse, path):
        return settings_converter(folder).structure(data, cls)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _merge(data: dict[str, Any], other: Mapping[str, Any], where: str, above: tuple[str, ...] = ()) -> None:
    """Merge ``other`` into ``data`` recursively; ``other`` wins.

    Args:
        where: added to messages about ``data``.
        above: names of the enclosing tables.

    Raises:
        ConfigError: ``data`` has another type where a table is required; merging would hide that.
    """
    for key, value in other.items():
        steps = (*above, key)
        if isinstance(value, Mapping) and isinstance(data.get(key), dict):
            _merge(data[key], value, where, steps)
        elif isinstance(value, Mapping) and key in data and _is_table(_type_of(steps)):
            path = ".".join(steps)
            raise ConfigError(f"{path}: must be a table, not {noun_of(data[key])}{where}", path)
        else:
            data[key] = dict(value) if isinstance(value, Mapping) else value


def _collect_options(data: dict[str, Any]) -> dict[str, Any]:
    """Move the keys of backends and plugins into the ``options`` of their table."""
    collected = dict(data)
    if isinstance(models := data.get("models"), dict):
        collected["models"] = {name: _split(table, _OWN) for name, table in models.items()}
    if isinstance(plugins := data.get("plugins"), dict):
        collected["plugins"] = _split(plugins, {"allow", "deny"})
    return collected


def _split(table: Any, own: set[str]) -> Any:
    if not isinstance(table, dict):
        return table
    kept = {key: value for key, value in table.items() if key in own}
    rest = {key: value for key, value in table.items() if key not in own}
    return {**kept, "options": rest} if rest else kept


def _resolve_paths(settings: Settings, folder: Path) -> Settings:
    """Make file names that are relative to the configuration file's folder absolute."""
    models = {name: _resolve_model(model, folder) for name, model in settings.models.items()}
    server = settings.server
    server = evolve(
        server,
        uds=_beside(server.uds, folder),
        ssl_certfile=_beside(server.ssl_certfile, folder),
        ssl_keyfile=_beside(server.ssl_keyfile, folder),
        ssl_ca_certs=_beside(server.ssl_ca_certs, folder),
    )
    key_file = settings.auth.key_file
    if key_file is not None and not Path(key_file).expanduser().exists():
        key_file = str(folder / Path(key_file).expanduser())  # where ``enginehouse keys add`` will create it
    auth = evolve(settings.auth, key_file=_resolve(key_file, folder))
    plugins = evolve(settings.plugins, folder=str(folder))  # whose options have paths that only the plugins know
    return evolve(settings, server=server, auth=auth, models=models, plugins=plugins)


def _resolve(name: str | None, folder: Path) -> str | None:
    return str(folder / name) if name and (folder / name).exists() else name


def _beside(name: str | None, folder: Path) -> str | None:
    return name and str(folder / Path(name).expanduser())


def _resolve_model(model: ModelSettings, folder: Path) -> ModelSettings:
    def resolve_source(source: str) -> str:
        name, colon, quantization = source.rpartition(":")
        whole = _resolve(source, folder) or source
        return whole if whole != source or not colon else f"{_resolve(name, folder)}:{quantization}"

    return evolve(
        model,
        source=resolve_source(model.source),
        drafters=_resolve_drafters(model.drafters, resolve_source),
        python=_resolve(model.python, folder),
        chat_template=_resolve(model.chat_template, folder),
        prefix_cache_dir=_beside(model.prefix_cache_dir, folder),
        adapters={key: evolve(one, source=resolve_source(one.source)) for key, one in model.adapters.items()},
        adapter_folders=tuple(str(folder / Path(name).expanduser()) for name in model.adapter_folders),
    )


def _resolve_drafters(
    drafters: tuple[DrafterSettings, ...] | None, resolve: Callable[[str], str]
) -> tuple[DrafterSettings, ...] | None:
    return drafters and tuple(one.with_source(resolve(one.source)) if one.source else one for one in drafters)


def _from_environment(env: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in ``env`` as nested tables; ``data`` holds the model names."""
    found: dict[str, Any] = {}
    for variable in sorted(env):
        steps = variable.removeprefix(_PREFIX).lower().split("__")
        if not variable.startswith(_PREFIX) or (len(steps) < 2 and not _is_table(_type_of(steps), or_unknown=False)):
            continue
        if len(steps) < 2:
            raise ConfigError(f"{steps[0]}: is a table; set {variable}__<KEY> instead of {variable}", steps[0])
        if steps[0] == "models":
            steps[1] = _model_name(steps[1], data.get("models"))
        try:
            value = _parse(env[variable], _type_of(steps))
        except ValueError as error:
            problem = Problem(".".join(steps), f"{error} (in the variable {variable})")
            raise ConfigError(str(problem), problem.path) from error
        for step in reversed(steps):
            value = {step: value}
        _merge(found, value, f" (in the variables of its name and {variable})")
    return found


def _model_name(step: str, models: Any) -> str:
    """Return the configured model that a variable refers to: names may hold characters that variables cannot."""
    names = list(models) if isinstance(models, dict) else []
    return next((name for name in names if re.sub(r"[^a-z0-9]", "_", name.lower()) == step), step)


def _is_table(kind: Any, *, or_unknown: bool = True) -> bool:
    """Return True if a setting of that type can only be a table; ``or_unknown``: also for unknown types."""
    return attrs.has(kind) or get_origin(kind) is dict or (kind is Any and or_unknown)


def _type_of(steps: Sequence[str]) -> Any:
    """Return the type of the setting at ``steps``; Any if core does not know it."""
    kind: Any = Settings
    if steps and steps[0] == "model_defaults":
        kind, steps = ModelSettings, steps[1:]
    for step in steps:
        if attrs.has(kind):
            kind = get_type_hints(kind).get(step, Any)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else Any
    return kind


def _parse(text: str, kind: Any) -> Any:
    """Parse a variable's text: strings are taken as they are, lists may use commas, the rest is TOML."""
    alternatives = get_args(kind) if type(None) in get_args(kind) else (kind,)
    if any(choice is str or get_origin(choice) is Literal for choice in alternatives):
        return text
    if any(get_origin(choice) is tuple for choice in alternatives) and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(value) != {"value"}:
        raise ValueError("must be one TOML value")
    return value["value"]
