"""The table of docs/troubleshooting.md: codes and statuses from the source, cause and remedy of each from here."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

from attrs import frozen

import enginehouse.api
from enginehouse.api.http.errors import describe, http_error
from enginehouse.contract.errors import EnginehouseError

from .repository import source_files, syntax_of

__all__ = ["HELP", "Help", "code_table", "statuses_of_codes"]


@frozen
class Help:
    """One row of the table, Markdown.

    Attributes:
        cause: what has happened.
        remedy: what a client or the server's operator can do.
    """

    cause: str
    remedy: str


HELP = {
    "bad_request": Help(
        "The request is not valid HTTP, or has several Host headers or (except in HTTP/1.0) none.",
        "Use an HTTP/1.1 client library.",
    ),
    "adapter_not_found": Help(
        "The model has no adapter of that name.",
        "Use a name that `GET /v1/models` lists with `parent`, or add the adapter ([adapters](adapters.md)).",
    ),
    "adapter_refused": Help(
        "The files of an adapter are damaged, do not fit the model, have changed, or are outside of the model's "
        "`adapter_folders`; the message says which.",
        "Correct the files or `adapter_folders`, and add the adapter again.",
    ),
    "authenticator_failed": Help(
        "The plugin of `auth.authenticators` that the message names failed, took longer than `auth.timeout_s`, or was "
        "asked by too many callers at once.",
        "Try again after `Retry-After`; the operator finds the reason in the server's log.",
    ),
    "body_too_large": Help(
        "The body is longer than `limits.max_body_bytes`, or could never fit the bounds on memory.",
        "Send less, such as smaller images; or raise the limit ([memory](limits.md#memory-for-what-clients-send)), "
        "also in a proxy before the server.",
    ),
    "cancelled": Help(
        "The client closed the connection before its request was complete.", "None; only the log shows it."
    ),
    "conflict": Help(
        "A model cannot be loaded or unloaded now: it is loading, pinned, in use or being unloaded.",
        "Wait, or unload with `drain` or `force` ([models](models.md#commands)).",
    ),
    "context_length_exceeded": Help(
        "The prompt has more tokens than the model's context; the message gives both numbers.",
        "Shorten the prompt, raise the model's `context`, or let [compression](compression.md) shorten it.",
    ),
    "engine_dead": Help(
        "The model's worker died and the request could not be continued in another one.",
        "Try again. If it repeats, read the worker's last lines in the log ([recovery](recovery.md)).",
    ),
    "expired_api_key": Help(
        "The API key's expiry date has passed.", "Ask the operator for a new key (`enginehouse keys add`)."
    ),
    "first_token_timeout": Help(
        "No token came within `first_token_timeout_s`.",
        "Raise the limit, or reduce prompts and load ([limits](limits.md)).",
    ),
    "forbidden": Help("The request is not allowed.", "See the message."),
    "generation_failed": Help(
        "The request failed inside the engine; others are not affected.",
        "Read the server's log, which has the details under the request id of the message; try without the field "
        "or plugin that it names.",
    ),
    "headers_too_large": Help(
        "The request's headers exceed `limits.max_header_bytes` or `limits.max_headers`.",
        "Send fewer headers (cookies, for example), or raise the limits.",
    ),
    "host_not_allowed": Help(
        "The Host header is neither loopback nor the configured host.",
        "Add the name, such as the proxy's, to `server.allowed_hosts`.",
    ),
    "insufficient_memory": Help(
        "Other models hold the memory and did not finish in time.",
        "Try again after `Retry-After`; raise the budget, or reduce `slots` or `context` ([memory](models.md#memory)).",
    ),
    "insufficient_scope": Help(
        "The key lacks the scope of this address; or, without keys, `/admin` was not called directly from the "
        "server's own machine (another machine, a proxy, a web page of another origin).",
        "Use a key with that scope (`enginehouse keys add NAME --scope admin`).",
    ),
    "internal_error": Help(
        "A fault of the server.", "Read the traceback in its log, under the request id of the message, and report it."
    ),
    "invalid_api_key": Help(
        "API keys are configured, and the request has none of them.",
        "Send `Authorization: Bearer <key>` or `x-api-key: <key>`.",
    ),
    "invalid_configuration": Help(
        "A reload found an error in the configuration; `param` names the setting. The old one stays active.",
        "Correct the file and reload again.",
    ),
    "invalid_request": Help("The request cannot be served as it is.", "See the message."),
    "invalid_value": Help(
        "A field has a wrong type, value or combination; `param` is its path.",
        "Correct the field; `GET /schema` lists types and bounds.",
    ),
    "method_not_allowed": Help("The address does not take this method.", "Use one that the header `Allow` lists."),
    "model_load_failed": Help(
        "The model could not be opened (missing file, missing library, damaged file). The log has the reason; the "
        "message has it only for callers with access to `/admin`.",
        "`enginehouse doctor` checks files and backends; correct the cause, then reload or load the model by hand.",
    ),
    "source_not_allowed": Help(
        "An administrator named a source outside the folders and ids that the settings allow.",
        "Put the model into `server.models_dir`, or its id into `server.allowed_sources`.",
    ),
    "source_not_found": Help(
        "The settings allow this source of a model, but it is not there.",
        'Check the path; for a hub id, ask with `"download": true`.',
    ),
    "model_not_found": Help(
        "No model of that name is served, or the key may not use it.",
        "Use a name that `GET /v1/models` lists.",
    ),
    "model_not_ready": Help(
        "The model is loading or restarting.",
        "Try again after `Retry-After`; `/health` and `GET /admin/models` show the progress.",
    ),
    "model_overloaded": Help(
        "The model's queue is full, or the expected wait is longer than `queue_timeout_s`.",
        "Try again after `Retry-After`; raise `limits.max_queue` or `slots` ([limits](limits.md#too-much-to-do)).",
    ),
    "model_too_large": Help(
        "The model needs more memory than the budget, even with all others unloaded.",
        "Reduce `context` or `slots`, use a smaller quantisation, or raise `limits.memory_budget`.",
    ),
    "model_unloaded": Help(
        "An operator or a new configuration unloaded the model while it answered.",
        "Try again; the model is loaded again if it is still configured.",
    ),
    "not_found": Help(
        "There is nothing at this address.", "Check the path; OpenAI clients need a base URL that ends in `/v1`."
    ),
    "not_thinking": Help(
        "The request has no open reasoning that could be ended.",
        "None: it has ended its reasoning already, or never began.",
    ),
    "origin_not_allowed": Help(
        "A web page of another origin called the server.", "Add its origin to `server.cors_origins`."
    ),
    "plugin_failed": Help(
        "A plugin raised an exception, gave a wrong result, did not return or ended the worker; the message names it.",
        "Read the traceback in the server's log, and report it to the plugin's author; try without its field.",
    ),
    "queue_full": Help(
        "The caller's own requests fill its share of the queue.",
        "Send fewer at once, try again after `Retry-After`; or raise `limits.max_queue_per_key`.",
    ),
    "queue_timeout": Help(
        "The request waited for longer than `queue_timeout_s`.",
        "Try again after `Retry-After`; see `model_overloaded`.",
    ),
    "rate_limit_exceeded": Help(
        "A limit of the key or of the server is used up: requests or tokens per minute, concurrent requests, or "
        "the key's share of [memory](limits.md#memory-for-what-clients-send).",
        "Wait for `Retry-After`; the `x-ratelimit-*` headers show what is left ([limits](limits.md#rates)).",
    ),
    "reload_failed": Help(
        "A plugin failed over a new configuration. The old one stays active.",
        "Read the traceback in the log; correct or remove that plugin's settings.",
    ),
    "request_cancelled": Help("An operator cancelled the request.", "Do not repeat it; ask the operator."),
    "request_kills_worker": Help(
        "The model's worker died twice while it ran this request or question, or its text or constraint did so lately.",
        "Do not repeat it; keep the request and the log for a bug report to the backend ([recovery](recovery.md)).",
    ),
    "request_not_running": Help("No request of that id is running.", "Take ids from `GET /admin/requests`."),
    "request_timeout": Help(
        "The head or the body did not arrive within `server.head_timeout_s` or `server.body_timeout_s`.",
        "Check the connection; raise the limits for slow uploads.",
    ),
    "server_overloaded": Help(
        "As many requests are running as `limits.max_concurrent` allows, they hold `limits.max_client_bytes` of "
        "memory, or all rendering processes are busy.",
        "Try again after `Retry-After`.",
    ),
    "server_stopping": Help("The server is shutting down.", "Try again on another server, or later."),
    "template_error": Help(
        "The model's chat template refused a message, failed, or exceeded its limits of time and size; `param` is the "
        "message, or what the template needs.",
        "Check roles and their order; another template: `chat_template` of the model.",
    ),
    "total_timeout": Help(
        "The response did not end within `total_timeout_s`.", "Lower `max_tokens`, or raise the limit."
    ),
    "unsupported_media_type": Help(
        "The body is not JSON in UTF-8, or is compressed.",
        "Send `Content-Type: application/json` and no `Content-Encoding`.",
    ),
    "unsupported_task": Help(
        "The model does something else than the request asks for, such as embeddings instead of text.",
        "Ask a model whose `task` in `/v1/models` fits.",
    ),
    "unsupported_parameter": Help(
        "A known field that this model cannot honour; the message says why.",
        'Remove it; or set `server.unsupported_parameters = "report"` to serve such requests without it.',
    ),
}


@cache
def statuses_of_codes() -> dict[str, set[int]]:
    """Every error code that the server can send, with its HTTP statuses, read from the source."""
    _import_all(enginehouse.api)
    found: dict[str, set[int]] = {}
    for kind in _subclasses(EnginehouseError):
        error = kind.__new__(kind)
        error.message = ""
        found.setdefault(describe(error).code, set()).add(describe(error).status)
    for status in range(400, 500):
        code = http_error(status, "").code
        if code != "error":
            found.setdefault(code, set()).add(status)
    for status, code in _codes_at_calls():
        found.setdefault(code, set()).add(status)
    return found


def code_table() -> str:
    """One row per code, sorted by status."""
    rows = [
        f"| {', '.join(map(str, sorted(statuses)))} | `{code}` | {HELP[code].cause} | {HELP[code].remedy} |\n"
        for code, statuses in sorted(statuses_of_codes().items(), key=lambda item: (min(item[1]), item[0]))
        if code in HELP
    ]
    return "".join(["| status | `code` | cause | remedy |\n", "|---|---|---|---|\n", *rows])


def _subclasses(kind: type[EnginehouseError]) -> Iterator[type[EnginehouseError]]:
    """The class and all below it, of core only."""
    if kind.__module__.startswith("enginehouse."):
        yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


def _codes_at_calls() -> Iterator[tuple[int, str]]:
    """Status and code of calls such as ``http_error(403, message, "host_not_allowed")``."""
    for path in source_files("core"):
        for node in ast.walk(syntax_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "http_error":
                values = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                if len(node.args) > 2 and isinstance(values[-1], str):
                    yield values[0], values[-1]


def _import_all(package: object) -> None:
    """Import every module of a package, so that all its classes are known."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):  # type: ignore[attr-defined]
        importlib.import_module(module.name)
