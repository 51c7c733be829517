"""Sends a workload to a server and records the arrival time of each piece of each answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import define, field, frozen

from enginehouse_bench.http import RequestFailed, stream_chat
from enginehouse_bench.workload import Planned, Workload

__all__ = ["Answered", "Run", "Served", "drive"]


@frozen
class Served:
    """The server and the model under test."""

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    fields: Mapping[str, Any] = field(factory=dict)


@define
class Answered:
    """Result of one request. Times in seconds from the start of the run.

    Attributes:
        due_s: scheduled send time; later waiting counts as the server's time.
        text_times_s: arrival time of each piece of text.
        error: reason why there was no complete answer.
    """

    due_s: float
    text_times_s: list[float] = field(factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


@frozen
class Run:
    """A whole run; ``is_cut``: the time limit was reached before all requests were answered."""

    answered: tuple[Answered, ...]
    wall_s: float
    is_cut: bool = False


def drive(
    served: Served,
    workload: Workload,
    *,
    clients: int,
    limit_s: float,
    timeout_s: float,
    on_answer: Callable[[Answered], None] = lambda _: None,
) -> Run:
    """Run the workload.

    Args:
        clients: maximum number of concurrent requests.
        limit_s: maximum duration of the run; requests in progress are cut off and not counted.
        timeout_s: maximum duration of one request.
        on_answer: called with each finished request.
    """
    return asyncio.run(_Driver(served, clients, timeout_s, on_answer).run(workload, limit_s))


class _Driver:
    def __init__(self, served: Served, clients: int, timeout_s: float, on_answer: Callable[[Answered], None]) -> None:
        self._served, self._clients, self._timeout_s = served, clients, timeout_s
        self._on_answer = on_answer
        self._answered: list[Answered] = []
        self._began_s = 0.0

    async def run(self, workload: Workload, limit_s: float) -> Run:
        self._began_s = time.perf_counter()
        is_cut = False
        requests = workload.requests()
        sending = self._in_time(requests) if workload.rate is not None else self._one_after_the_other(requests)
        try:
            async with asyncio.timeout(limit_s):
                await sending
        except TimeoutError:
            is_cut = True
        return Run(tuple(self._answered), self._now(), is_cut)

    async def _one_after_the_other(self, requests: Iterator[Planned]) -> None:
        """Closed loop: each client sends its next request when its last one is answered."""

        async def client() -> None:
            for planned in requests:
                await self._ask(planned, self._now())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(client())

    async def _in_time(self, requests: Iterator[Planned]) -> None:
        """Open loop: each request is sent when it is due, independent of the others, up to ``clients`` at once."""
        free = asyncio.Semaphore(self._clients)
        async with asyncio.TaskGroup() as group:
            for planned in requests:
                await asyncio.sleep(max(0.0, planned.due_s - self._now()))
                await free.acquire()
                task = group.create_task(self._ask(planned, planned.due_s))
                task.add_done_callback(lambda _: free.release())

    async def _ask(self, planned: Planned, due_s: float) -> None:
        answer = Answered(due_s)
        chunks = stream_chat(f"{self._served.url}/chat/completions", self._body(planned), self._served.key)
        try:
            async with asyncio.timeout(self._timeout_s), contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._note(answer, chunk)
        except RequestFailed as error:
            answer.error = error.reason
        except TimeoutError:
            answer.error = f"no whole answer within {self._timeout_s:g} s"
        answer.end_s = self._now()
        self._answered.append(answer)
        self._on_answer(answer)

    def _note(self, answer: Answered, chunk: dict[str, Any]) -> None:
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
        if any(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") for delta in deltas):
            answer.text_times_s.append(self._now())
        if usage := chunk.get("usage"):
            answer.num_prompt_tokens = usage.get("prompt_tokens") or 0
            answer.num_output_tokens = usage.get("completion_tokens") or 0

    def _body(self, planned: Planned) -> bytes:
        return json.dumps(
            {
                "model": self._served.model,
                "messages": [{"role": "user", "content": planned.prompt}],
                "max_tokens": planned.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._served.fields,
            }
        ).encode()

    def _now(self) -> float:
        return time.perf_counter() - self._began_s
