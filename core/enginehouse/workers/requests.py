"""The requests that a worker holds, on the server's side: each step's events reach the generations they belong to.

On the link a request has a name of its own. One that was taken out of the worker and comes back gets a new one, since
events of its earlier stay may still be on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from enginehouse.contract.errors import EngineDead, WorkerDied
from enginehouse.contract.types import RequestFinished
from enginehouse.workers.backlog import Backlog
from enginehouse.workers.generation import WorkerGeneration
from enginehouse.workers.messages import Accepted, Begun, Entered, Failure, Left, Rejected, Started, StepOutputs

__all__ = ["Requests"]


class Requests:
    """Generations by request and by their names on the link.

    Args:
        backlog: told who comes and goes.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._generations: dict[str, WorkerGeneration] = {}
        self._leaving: dict[str, WorkerGeneration] = {}  # cancelled, and the worker has not said that it is rid of it
        self._link_ids: dict[str, str] = {}
        self._num_resumed = itertools.count(1)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._link_ids

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[WorkerGeneration]:
        return iter(self._generations.values())

    def link_id(self, request_id: str, *, is_resumed: bool) -> str:
        """What a request that is about to enter is called on the link."""
        return f"{request_id}~{next(self._num_resumed)}" if is_resumed else request_id

    def add(self, link_id: str, generation: WorkerGeneration) -> None:
        """The request was sent."""
        self._generations[link_id], self._link_ids[generation.request_id] = generation, link_id

    def find(self, request_id: str) -> tuple[str, WorkerGeneration | None]:
        """A request's name on the link, and its generation if it runs."""
        link_id = self._link_ids.get(request_id, request_id)
        return link_id, self._generations.get(link_id)

    def request_id(self, link_id: str) -> str:
        """The request behind a name on the link."""
        generation = self._generations.get(link_id)
        return generation.request_id if generation is not None else link_id

    def forget(self, link_id: str, *, is_served: bool = False) -> WorkerGeneration | None:
        """Take a request out, perhaps because it was answered; None when it is not in."""
        generation = self._generations.pop(link_id, None)
        if generation is not None:
            self._link_ids.pop(generation.request_id, None)
            self._backlog.leave(generation.request_id, is_served=is_served)
        return generation

    def cancel(self, link_id: str) -> bool:
        """Take a request out that the worker still holds until it says Left; False when it is not in."""
        generation = self.forget(link_id)
        if generation is not None:
            self._leaving[link_id] = generation
        return generation is not None

    @property
    def is_any_begun(self) -> bool:
        """Whether the worker has worked on any of those that it holds."""
        return any(held.is_begun for held in (*self._generations.values(), *self._leaving.values()))

    def fail_all(self, error: EngineDead) -> None:
        """End every request."""
        leaving, self._leaving = self._leaving, {}
        if not isinstance(error, WorkerDied):
            for generation in leaving.values():
                generation.leave()
        generations, self._generations = self._generations, {}
        self._link_ids.clear()
        self._backlog.clear()
        for generation in generations.values():
            generation.fail(error)

    def handle(self, message: Accepted | Begun | Entered | Left | Rejected | Started) -> None:
        """What the worker says of one request; an answer to one that was cancelled meanwhile is dropped."""
        if isinstance(message, Left):
            if (generation := self._leaving.pop(message.request_id, None)) is not None:
                generation.leave()
            return
        if isinstance(message, Begun):
            link_id = str(message.work)
            if (generation := self._generations.get(link_id) or self._leaving.get(link_id)) is not None:
                generation.begin(message.stage)
            return
        generation = self._generations.get(message.request_id)
        if generation is None:
            return
        if isinstance(message, Started):
            self._backlog.start(generation.request_id)
        match message:
            case Accepted():
                generation.accept(message.num_prompt_tokens)
            case Rejected():
                error = self._backlog.explain(message.failure.to_error(), generation.request_id)
                self.forget(message.request_id)
                generation.fail(error)
            case _ if generation.recorder is None:
                pass
            case Entered():
                generation.recorder.entered()
            case Started():
                generation.recorder.started(message.num_cached_tokens, message.num_loaded_tokens, message.cache_miss)

    def distribute(self, message: StepOutputs) -> None:
        """Give each request its events of one step."""
        generations = self._generations
        for link_id, output in message.outputs:
            generation = generations.get(link_id)
            if generation is None:
                continue
            if isinstance(output, Failure):
                self.forget(link_id)
                generation.fail(self._backlog.explain(output.to_error(), generation.request_id))
                continue
            if isinstance(output, RequestFinished):
                self.forget(link_id, is_served=True)
            generation.push(output)
