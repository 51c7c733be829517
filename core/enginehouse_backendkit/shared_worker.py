"""One worker process that several servers use, each over a link of its own; runs beside the worker, on its machine.

Each server speaks with it as with a worker of its own: the links have their own ids of requests and numbers of calls.
When a link ends, the worker drops what came over it. Does not know how the bytes travel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import msgspec
from attrs import evolve
from msgspec.structs import replace

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.inspection import EngineMetrics
from enginehouse.contract.types import RequestFinished
from enginehouse.workers.ipc import FrameCutter, FrameTooLarge, frame
from enginehouse.workers.launch import start_worker
from enginehouse.workers.messages import (
    Accepted,
    Cancel,
    Close,
    Died,
    Entered,
    Failure,
    FromWorker,
    Hello,
    Left,
    Load,
    LoadFailed,
    LoadProgress,
    MediaBytes,
    MetricsReport,
    Ready,
    Rejected,
    StageBegan,
    Started,
    StepOutputs,
    StopThinking,
    Submit,
    ToWorker,
    View,
    decode_from_worker,
    decode_to_worker,
    encode,
    failure_of,
    pack,
)
from enginehouse.workers.process import Connection

__all__ = ["ServerLink", "SharedWorker"]

_CALL_BITS = 40
"""Bits of a call's number that are the server's own."""

_CLOSE_S = 5.0


class SharedWorker:
    """A worker process with its model. Used on one event loop, whose thread lives as long as this.

    Args:
        load: the Load message, as the server has encoded it.

    Attributes:
        ready: done when the model is loaded; raises ModelLoadError.
        died: done with the reason when the process has ended.
        metrics: the last counters that it has reported.
    """

    def __init__(self, load: bytes) -> None:
        message = decode_to_worker(load)
        assert isinstance(message, Load)
        self._load = message
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.metrics = EngineMetrics()
        self._worker = start_worker("process", None)
        self._connection: Connection[ToWorker, FromWorker] = Connection(
            pack, decode_from_worker, self._from_worker, self._end
        )
        self._links: dict[int, ServerLink] = {}
        self._numbers = itertools.count(1)
        self._hello: Hello | None = None
        self._outcome: Ready | LoadFailed | None = None  # of the load

    async def open(self) -> None:
        """Start to load the model."""
        await self._connection.open(self._worker.socket)
        self._connection.send(self._load)

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._worker.pid

    @property
    def num_requests(self) -> int:
        """Number of requests of all servers."""
        return sum(len(link.request_ids) for link in self._links.values())

    def link(self) -> ServerLink:
        """Return a new link for a server."""
        link = ServerLink(self, next(self._numbers))
        self._links[link.number] = link
        if self._hello is not None:
            link.deliver(self._hello)
        if self.died.done():
            link.end(self.died.result())
        return link

    async def close(self) -> None:
        """End the process."""
        self._end("was closed")
        self._connection.send(Close())
        await asyncio.wait([self._worker.ended], timeout=_CLOSE_S)
        self._worker.kill()
        self._connection.abort()

    # -- used by links -----------------------------------------------------------------------------

    def admit(self, link: ServerLink, load: Load) -> None:
        """Answer a server's Load with the outcome of the load, once it is known, or refuse it for its other settings.

        Relative paths of plugins are those of the server that has deployed the replicas.
        """
        theirs, ours = (replace(one, plugins=evolve(one.plugins, folder="")) for one in (load, self._load))
        if different := [name for name in Load.__struct_fields__ if getattr(theirs, name) != getattr(ours, name)]:
            error = ModelLoadError(
                f"the replicas were deployed with other settings of this model ({', '.join(different)}); deploy them "
                "again with the configuration of this server"
            )
            link.refuse(LoadFailed(failure_of(error)))
            return
        link.is_admitted = True
        if self._outcome is not None:
            link.deliver(self._outcome)

    def send(self, message: ToWorker) -> None:
        """Send a message to the worker."""
        self._connection.send(message)

    def forget(self, link: ServerLink) -> None:
        """Drop a link and its requests."""
        if self._links.pop(link.number, None) is not None:
            for request_id in link.request_ids:
                self._connection.send(Cancel(request_id))

    # -- messages of the worker --------------------------------------------------------------------

    def _from_worker(self, message: FromWorker) -> None:
        match message:
            case StepOutputs():
                self._distribute(message)
            case Hello():
                self._hello = message
                self._send_all(message)
            case Ready() | LoadFailed():
                self._note_outcome(message)
            case MetricsReport():
                self.metrics = message.metrics
                self._send_all(message)
            case LoadProgress() | Died():
                self._send_all(message)
            case Accepted() | Rejected() | Entered() | Started() | Left():
                self._deliver(message.request_id, message)
            case StageBegan():
                self._deliver_stage(message)
            case _:
                if (link := self._links.get(message.call >> _CALL_BITS)) is not None:
                    link.deliver(link.own_answer(replace(message, call=_own_call(message.call))))

    def _note_outcome(self, message: Ready | LoadFailed) -> None:
        self._outcome = message
        for link in self._links.values():
            if link.is_admitted:
                link.deliver(message)
        if isinstance(message, Ready) and not self.ready.done():
            self.ready.set_result(None)
        elif isinstance(message, LoadFailed) and not self.ready.done():
            self.ready.set_exception(message.failure.to_error())
            self.ready.exception()

    def _send_all(self, message: FromWorker) -> None:
        for link in self._links.values():
            link.deliver(message)

    def _deliver(self, request_id: str, message: Accepted | Rejected | Entered | Started | Left) -> None:
        number, own_id = _split(request_id)
        link = self._links.get(number)
        if link is None:
            return
        if isinstance(message, Rejected | Left):
            link.request_ids.discard(request_id)
        link.deliver(replace(message, request_id=own_id))

    def _deliver_stage(self, message: StageBegan) -> None:
        """Deliver the stage of a request, which has an id, or of a call, which has a number."""
        work = message.work
        number, own = _split(work) if isinstance(work, str) else (work >> _CALL_BITS, _own_call(work))
        if (link := self._links.get(number)) is not None:
            link.deliver(replace(message, work=own))

    def _distribute(self, message: StepOutputs) -> None:
        """Give each server the outputs of its own requests; one message each."""
        parts: dict[int, StepOutputs] = {}
        for request_id, output in message.outputs:
            number, own_id = _split(request_id)
            parts.setdefault(number, StepOutputs([])).outputs.append((own_id, output))
            if isinstance(output, Failure | RequestFinished) and number in self._links:
                self._links[number].request_ids.discard(request_id)
        for number, part in parts.items():
            if (link := self._links.get(number)) is not None:
                link.deliver(part)

    def _end(self, reason: str | None) -> None:
        if self.died.done():
            return
        status = self._worker.ended.result().text if self._worker.ended.done() else "process ended"
        self.died.set_result(reason or f"the worker {status}")
        if not self.ready.done():
            self.ready.set_exception(ModelLoadError(f"The worker ended while it loaded the model: {status}"))
            self.ready.exception()
        for link in tuple(self._links.values()):
            link.end(self.died.result())


class ServerLink:
    """The worker's end of the link with one server.

    Attributes:
        number: unique among the links of the worker.
        request_ids: ids, in the worker, of the requests that it holds for the server.
        is_admitted: True once the server has said which model it wants, and it is this one.
    """

    def __init__(self, worker: SharedWorker, number: int) -> None:
        self.number = number
        self.is_admitted = False
        self.request_ids: set[str] = set()
        self._worker = worker
        self._cutter = FrameCutter()
        self._unsent = bytearray()
        self._changed = asyncio.Event()
        self._media_calls: set[int] = set()  # of media whose request has not come yet
        self._is_ended = False

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield bytes for the server, all that have arrived since the last ones; closing this ends the link."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._unsent:
                    data, self._unsent = bytes(self._unsent), bytearray()
                    yield data
                if self._is_ended and not self._unsent:
                    return
        finally:
            self.drop()

    def drop(self) -> None:
        """End the link because the server is gone; the worker drops its requests. Idempotent."""
        self._worker.forget(self)
        for call in self._media_calls:
            self._worker.send(MediaBytes(call, 0, b""))
        self._media_calls.clear()
        self._is_ended = True
        self._changed.set()

    def deliver(self, message: FromWorker) -> None:
        """Keep a message until the server is ready for it."""
        self._unsent += frame(encode(message))
        self._changed.set()

    def end(self, reason: str) -> None:
        """End the link because the worker has ended."""
        if not self._is_ended:
            self.deliver(Died(reason))
            self._is_ended = True

    def refuse(self, reason: LoadFailed) -> None:
        """End the link because the worker has another model."""
        self.deliver(reason)
        self._is_ended = True

    def feed(self, data: bytes) -> None:
        """Give the worker bytes that the server has sent."""
        try:
            for payload in self._cutter.feed(data):
                self._from_server(bytes(payload))
        except (FrameTooLarge, msgspec.DecodeError) as error:
            self.end(f"the server sent something that is not a message: {error}")

    def _from_server(self, payload: bytes) -> None:
        message = decode_to_worker(payload)
        match message:
            case Load():
                self._worker.admit(self, message)
            case Close():
                self._is_ended = True
                self._changed.set()
            case Submit():
                request_id = self._in_worker(message.request.request_id)
                self.request_ids.add(request_id)
                media_call = self._call_in_worker(message.media_call)
                self._media_calls.discard(media_call)
                request = evolve(message.request, request_id=request_id)
                self._worker.send(replace(message, request=request, media_call=media_call))
            case MediaBytes():
                media_call = self._call_in_worker(message.call)
                if message.data:
                    self._media_calls.add(media_call)
                else:
                    self._media_calls.discard(media_call)
                self._worker.send(replace(message, call=media_call))
            case Cancel():
                self._worker.send(Cancel(self._in_worker(message.request_id)))
            case StopThinking():
                call, request_id = self._call_in_worker(message.call), self._in_worker(message.request_id)
                self._worker.send(StopThinking(call, request_id))
            case _:
                call = self._call_in_worker(message.call)
                self._media_calls.discard(call)
                self._worker.send(replace(message, call=call))

    def own_answer(self, message: FromWorker) -> FromWorker:
        """Return an answer with the server's ids of its requests; those of other servers are left out."""
        if not isinstance(message, View):
            return message
        pairs = [(_split(request.request_id), request) for request in message.view.requests]
        own = tuple(replace(request, request_id=own_id) for (number, own_id), request in pairs if number == self.number)
        return replace(message, view=replace(message.view, requests=own))

    def _in_worker(self, request_id: str) -> str:
        return f"{self.number}:{request_id}"

    def _call_in_worker(self, call: int) -> int:
        return self.number << _CALL_BITS | (call & (1 << _CALL_BITS) - 1)


def _split(request_id: str) -> tuple[int, str]:
    number, _, own_id = request_id.partition(":")
    return int(number), own_id


def _own_call(call: int) -> int:
    return call & (1 << _CALL_BITS) - 1
