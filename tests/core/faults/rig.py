"""A server with models to break, and clients that watch it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
from attrs import define, field

from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.config import ModelSettings, ServerSettings, Settings
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.waiting import wait_until

__all__ = ["Answer", "Rig", "fake", "port_of", "rig"]

_PATIENCE_S = 100.0


def fake(*, slots: int = 4, step_timeout_s: float = 300.0, **options: Any) -> ModelSettings:
    """A fake model in a process; ``options`` are its backend's, or its own settings where they have that name."""
    known = ("isolation", "prefix_cache", "python", "replay", "replay_timeout_s")
    own = {name: options.pop(name) for name in known if name in options}
    options.setdefault("step_delay_s", 0.015)  # long enough for a client that is kept waiting to see the middle
    return ModelSettings(
        source="fake", backend="fake", slots=slots, step_timeout_s=step_timeout_s, options=options, **own
    )


@define(eq=False)
class Answer:
    """What one client sees, while it sees it."""

    status: int = 0
    lines: list[str] = field(factory=list)
    times_s: list[float] = field(factory=list)
    body: Any = None
    failure: str | None = None
    is_over: bool = False
    thread: threading.Thread | None = None

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def num_chunks(self) -> int:
        return sum(line.startswith("data: {") for line in self.lines)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error, wherever it came."""
        if isinstance(self.body, dict) and "error" in self.body:
            return dict(self.body["error"])
        return next((dict(chunk["error"]) for chunk in self.chunks if "error" in chunk), None)

    @property
    def is_complete(self) -> bool:
        return self.lines[-1:] == ["data: [DONE]"] if self.lines else self.status == 200

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Text, finish reason and log-probabilities of each choice, whether streamed or not."""
        if self.body is not None:
            whole = [(c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in self.body["choices"]]
        else:
            whole = [
                (c["index"], c["text"], c["finish_reason"], c["logprobs"])
                for chunk in self.chunks
                for c in chunk.get("choices", ())
            ]
        found: dict[int, dict[str, Any]] = {}
        for index, text, finish_reason, logprobs in whole:
            choice = found.setdefault(index, {"text": "", "finish_reason": None, "tokens": [], "logprobs": []})
            choice["text"] += text
            choice["finish_reason"] = finish_reason or choice["finish_reason"]
            choice["tokens"] += (logprobs or {}).get("tokens", [])
            choice["logprobs"] += [round(value or 0.0, 3) for value in (logprobs or {}).get("token_logprobs", [])]
        return [found[index] for index in sorted(found)]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two lines of a stream."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.times_s))

    @property
    def usage(self) -> dict[str, Any]:
        of_chunks = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(self.body["usage"] if self.body is not None else of_chunks[-1])

    def wait(self) -> Answer:
        """Until its end."""
        assert self.thread is not None
        self.thread.join(_PATIENCE_S)
        assert self.is_over, f"the request hangs after {len(self.lines)} lines"
        assert self.failure is None, self.failure
        return self

    def wait_chunks(self, count: int) -> None:
        """Until so many chunks are there."""
        wait_until(lambda: self.is_over or self.num_chunks >= count, lambda: f"{count} chunks; there are {self.lines}")
        assert not self.is_over, (self.status, self.body, self.lines[-3:])

    def wait_status(self) -> None:
        """Until it is accepted."""
        wait_until(lambda: self.status, "a status")


@define(eq=False)
class Rig:
    """A running server. The model that breaks is ``m``, the last one in the settings."""

    url: str
    _strangers: frozenset[int]

    def workers(self) -> list[psutil.Process]:
        """The worker processes of this server that break, the oldest first."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                is_worker = "enginehouse.workers" in child.cmdline()
                if is_worker and child.pid not in self._strangers and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda child: child.pid)

    def spare(self, num_models: int) -> None:
        """The first models, which are loaded, keep their workers: these started first."""
        self._strangers |= {worker.pid for worker in self.workers()[:num_models]}

    def kill(self) -> int:
        """kill -9 of the worker; returns which process it was, when it has gone."""
        (worker,) = self.workers()
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: worker.pid not in [other.pid for other in self.workers()], "its end")
        return worker.pid

    def kill_in_prefill(self, ask: Callable[[int], Answer]) -> Answer:
        """kill -9 of the worker while it computes a prompt; returns the response to that request.

        Args:
            ask: sends the request. Called again, with the number of the attempt, if this process was paused for so
                long that the first token came before the kill.
        """
        for attempt in range(5):
            answer = ask(attempt)
            answer.wait_status()
            self.kill()
            if not answer.chunks:
                return answer
            answer.wait()
            self.wait_ready()
        raise AssertionError("the first token came before each kill")

    def ask(self, prompt: str = "tell me", *, stream: bool = True, key: str | None = None, **fields: Any) -> Answer:
        """Send a completion request on a thread of its own."""
        fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "model": "m", "prompt": prompt, **fields}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        answer = Answer()

        def run() -> None:
            try:
                with self.client(key) as client:
                    self._read(client, {"stream": stream, **fields}, answer)
            except Exception as error:  # noqa: BLE001 - shown by the test
                answer.failure = repr(error)
            finally:
                answer.is_over = True

        answer.thread = threading.Thread(target=run, daemon=True)
        answer.thread.start()
        return answer

    def client(self, key: str | None = None) -> httpx.Client:
        """A client with this key."""
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        return httpx.Client(base_url=self.url, timeout=_PATIENCE_S, headers=headers)

    @staticmethod
    def _read(client: httpx.Client, body: dict[str, Any], answer: Answer) -> None:
        with client.stream("POST", "/v1/completions", json=body) as response:
            answer.status = response.status_code
            if body["stream"] and response.status_code == 200:
                for line in filter(None, response.iter_lines()):
                    answer.lines.append(line)
                    answer.times_s.append(time.monotonic())
            else:
                answer.body = json.loads(response.read())

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=60).status_code

    def wait_ready(self, timeout_s: float = _PATIENCE_S) -> None:
        wait_until(lambda: self.health() == 200, "/health", timeout_s)


def port_of(process: subprocess.Popen[bytes]) -> int:
    """The port at which a server process listens, once it does: one that cannot tell it in a log."""

    def ports() -> list[int]:
        assert process.poll() is None, f"it ended with code {process.returncode}"
        opened = psutil.Process(process.pid).net_connections("tcp")
        return [one.laddr.port for one in opened if one.status == psutil.CONN_LISTEN]

    return wait_until(ports, "the server's port")[0]


@contextlib.contextmanager
def rig(
    models: dict[str, ModelSettings], *, ready: bool = True, keys: tuple[str, ...] = (), **server: Any
) -> Iterator[Rig]:
    """Serve the models while the block runs."""
    strangers = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    settings = Settings(
        auth=AuthSettings(keys=keys),
        server=ServerSettings(**server),
        models=dict(models),
    )
    with server_thread(settings) as server_:
        running = Rig(server_.url, strangers)
        if ready:
            running.wait_ready()
            running.spare(len(models) - 1)
        yield running
