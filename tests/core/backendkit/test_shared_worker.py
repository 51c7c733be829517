"""A worker that several servers use: the model that each of them asks for."""

from __future__ import annotations

import os
from typing import Any

import pytest
from attrs import evolve
from msgspec.structs import replace

from enginehouse.contract.types import EngineSettings
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.ipc import FrameCutter, frame
from enginehouse.workers.messages import Hello, Load, LoadFailed, MediaBytes, Ready, decode_from_worker, encode
from enginehouse_backendkit.shared_worker import ServerLink, SharedWorker

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

_LOAD = Load("fake", "fake", None, {}, "models.m", EngineSettings(slots=4), PluginsSettings(allow=(), folder="/here"))


async def _answer(link: ServerLink, load: Load) -> list[Any]:
    """Return what a server hears until it knows whether it has its model."""
    cutter, heard = FrameCutter(), []
    link.feed(frame(encode(load)))
    async for data in link.frames():
        heard += [decode_from_worker(bytes(payload)) for payload in cutter.feed(data)]
        if any(isinstance(message, Ready | LoadFailed) for message in heard):
            break
    return [message for message in heard if isinstance(message, Hello | Ready | LoadFailed)]


async def test_server_that_wants_other_settings_is_refused_and_is_never_told_that_the_model_is_ready() -> None:
    worker = SharedWorker(encode(_LOAD))
    await worker.open()
    await worker.ready
    try:
        elsewhere = replace(_LOAD, plugins=evolve(_LOAD.plugins, folder="/there"))
        hello, ready = await _answer(worker.link(), elsewhere)
        assert isinstance(hello, Hello) and isinstance(ready, Ready)

        hello, failed = await _answer(worker.link(), replace(_LOAD, engine=EngineSettings(slots=5)))
        assert isinstance(hello, Hello) and isinstance(failed, LoadFailed)
        assert "other settings of this model (engine); deploy them again" in str(failed.failure)
    finally:
        await worker.close()


class _Noting:
    """Notes what a worker is sent, without a process."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def forget(self, link: ServerLink) -> None:
        pass


async def test_media_of_a_lost_server_are_dropped_unless_it_has_dropped_them() -> None:
    worker: Any = _Noting()
    link = ServerLink(worker, 1)
    for call, data in [(1, b"abc"), (2, b"abc"), (1, b"")]:
        link.feed(frame(encode(MediaBytes(call, 0, data))))
    first, second, dropped = worker.sent
    link.drop()

    assert (dropped, second.data) == (replace(first, data=b""), b"abc")
    assert worker.sent[3:] == [replace(second, data=b"")]
