"""Backend registration. Cheap to import; loads its HTTP library only in ``open``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import MissingDependency, ModelLoadError
from enginehouse_remote.options import RemoteOptions, base_url

__all__ = ["RemoteBackend"]


class RemoteBackend:
    """Opens models on OpenAI-compatible servers as engines."""

    name = "remote"
    api_version = 1
    options = RemoteOptions
    opens: Literal["model", "engine"] = "engine"

    def probe(self) -> Probe:
        """Check that httpx is installed."""
        if find_spec("httpx") is None:
            return Probe(False, reason=MissingDependency("httpx", self.name).message)
        return Probe(True, ("remote",))

    def match(self, source: ModelSource) -> Match:
        """Match URLs, without contacting the server."""
        if source.path is None and source.text.startswith(("http://", "https://")):
            return Match(1.0, "an address of a server")
        return Match(0.0, "not an http or https address")

    def estimate(self, source: ModelSource, options: RemoteOptions) -> MemoryEstimate:
        """Return zero: the model needs no local memory."""
        return MemoryEstimate(weights_bytes=0, kv_bytes_per_token=0, total_bytes=0)

    def open(self, source: ModelSource, options: RemoteOptions, progress: Progress) -> Engine:
        """Probe the servers and return the engine, which connects on first use."""
        if self.match(source).score == 0.0:
            raise ModelLoadError(f"{source.text}: not an http or https address")
        try:
            from enginehouse_remote.engine import RemoteEngine  # noqa: PLC0415 - imports httpx
            from enginehouse_remote.probing import probe_servers  # noqa: PLC0415
        except ImportError as error:
            raise MissingDependency(error.name or "httpx", self.name) from error
        urls = tuple(dict.fromkeys(base_url(url) for url in (source.text, *options.urls)))
        headers = options.headers()
        return RemoteEngine(probe_servers(urls, headers, options, progress), urls, headers, options)
