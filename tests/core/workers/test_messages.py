"""Messages and frames: whatever is sent arrives as it was, however the bytes are cut on the way."""

from __future__ import annotations

import asyncio
import os
import threading
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract import errors
from enginehouse.contract.types import EngineRequest
from enginehouse.workers import messages
from enginehouse.workers.ipc import MAX_FRAME_BYTES, FrameCutter, FrameTooLarge, Link, frame, socket_pair
from enginehouse.workers.messages import Cancel, FromWorker, StageBegan, decode_from_worker, encode, pack
from enginehouse.workers.process import Connection

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: texts,
    bytes: st.binary(max_size=4),
    type(None): st.none(),
}
SCALARS[Any] = st.recursive(
    st.one_of(*SCALARS.values()).filter(lambda value: not isinstance(value, bytes)),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=4,
)
BOUNDED = {"priority": st.integers(-(2**31), 2**31 - 1)}
"""Members of a request that check their bounds."""


def values_of(kind: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one per kind
    """Any value of an annotation, so that whatever is added to a message is tested with it."""
    arguments = get_args(kind)
    match get_origin(kind) or kind:
        case scalar if scalar in SCALARS:
            return SCALARS[scalar]
        case origin if origin is Literal:
            return st.sampled_from(arguments)
        case origin if origin in (Union, UnionType):
            return st.one_of(*map(values_of, arguments))
        case origin if origin is list:
            return st.lists(values_of(arguments[0]), max_size=3)
        case origin if origin is dict:
            return st.dictionaries(*map(values_of, arguments), max_size=3)
        case origin if origin is tuple and arguments[-1] is ...:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        case origin if origin is tuple:
            return st.tuples(*map(values_of, arguments))
        case fields if isinstance(fields, type):
            values = {name: values_of(hint) for name, hint in get_type_hints(fields).items()}
            return st.builds(fields, **(values | BOUNDED if fields is EngineRequest else values))
        case unknown:
            raise TypeError(f"no values of {unknown}")


to_worker = st.deferred(lambda: values_of(messages.ToWorker))
from_worker = st.deferred(lambda: values_of(messages.FromWorker))


@given(to_worker)
def test_message_to_the_worker_arrives_as_it_was_sent(message):
    assert messages.decode_to_worker(messages.encode(message)) == message


@given(from_worker)
def test_message_from_the_worker_arrives_as_it_was_sent(message):
    assert messages.decode_from_worker(messages.encode(message)) == message


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("bad", "temperature"),
        errors.UnsupportedParameter("not here", "tools"),
        errors.ContextLengthExceeded(900, 512, "messages"),
        errors.ModelNotFound("m"),
        errors.Overloaded("full", 2.5),
        errors.ModelLoadError("damaged file"),
        errors.MissingDependency("llama_cpp", "llamacpp"),
        errors.ConfigError("unknown", "models.m.slot"),
        errors.EngineDead("killed"),
        errors.GenerationFailed("sampler failed", "xtc"),
        errors.CacheFull(10, 3),
    ],
)
def test_error_keeps_its_class_message_and_fields_over_the_link(error):
    message = messages.decode_from_worker(messages.encode(messages.Rejected("r", messages.failure_of(error))))
    assert isinstance(message, messages.Rejected)
    arrived = message.failure.to_error()

    assert type(arrived) is type(error)
    assert arrived.message == error.message
    assert arrived.fields == error.fields


def test_error_with_fields_that_no_message_can_hold_still_arrives():
    error = errors.EngineError("odd", culprit=object)
    message = messages.decode_from_worker(messages.encode(messages.LoadFailed(messages.failure_of(error))))

    assert isinstance(message, messages.LoadFailed)
    assert message.failure.to_error().message == "odd"


def test_foreign_bytes_are_no_message():
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_worker(b"\x93\xa4evil\x01\x02")


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), max_size=20))
def test_frames_are_found_however_the_stream_is_cut(payloads, cuts):
    stream = b"".join(map(frame, payloads))
    cutter = FrameCutter()
    found: list[bytes] = []
    for size in [*cuts, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        found += [bytes(payload) for payload in cutter.feed(piece)]

    assert found == payloads


def test_frame_beyond_the_limit_is_refused_on_both_sides():
    length = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(FrameTooLarge):
        frame(bytes(MAX_FRAME_BYTES + 1))
    cutter = FrameCutter()
    assert list(cutter.feed(length[:2])) == []
    with pytest.raises(FrameTooLarge):
        list(cutter.feed(length[2:]))
    ours, theirs = socket_pair()
    with ours:
        ours.sendall(length)
        link = Link(theirs)
        with pytest.raises(FrameTooLarge):
            link.receive()
        link.close()


def test_link_carries_frames_that_exceed_the_socket_buffer():
    ours, theirs = socket_pair()
    sender, receiver = Link(ours), Link(theirs)
    payload = bytes(range(256)) * 40_000
    thread = threading.Thread(target=lambda: [sender.send(payload), sender.send(b"")])
    thread.start()

    assert receiver.receive() == payload
    assert receiver.receive() == b""
    thread.join()
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_link_says_that_the_other_side_is_gone():
    ours, theirs = socket_pair()
    ours.sendall(frame(b"whole") + frame(b"cut off")[:6])
    ours.close()
    link = Link(theirs)

    assert link.receive() == b"whole"
    assert link.receive() is None
    assert not link.send(b"anyone?")
    link.close()


def test_link_wakes_a_blocked_sender_when_the_other_side_closes():
    ours, theirs = socket_pair()
    link, results = Link(theirs), []
    thread = threading.Thread(target=lambda: results.append(link.send(bytes(32 * 1024 * 1024))))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "the buffer holds more than expected, so this test shows nothing"
    ours.close()
    thread.join(60)

    assert results == [False]
    link.close()


async def test_connection_ends_with_a_message_beyond_its_own_limit():
    """A rendering process may send much less than a worker, and one that was taken over must not fill the memory."""
    ours, theirs = socket_pair()
    said: list[FromWorker] = []
    lost: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    connection = Connection(pack, decode_from_worker, said.append, lost.set_result, max_frame_bytes=100)
    await connection.open(ours)
    with theirs:
        theirs.sendall(frame(encode(StageBegan("a", "text"))) + frame(bytes(101)))
        async with asyncio.timeout(60):
            assert "a frame of 101 bytes exceeds the limit of 100" in str(await lost)

    assert said == [StageBegan("a", "text")]
    assert not connection.is_open


@pytest.mark.skipif(os.name != "posix", reason="uvloop needs POSIX")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_a_worker_sent_last_is_read_although_nothing_can_be_sent_to_it_any_more(loop):
    """It may say what it was working on when it died."""

    async def scene() -> None:
        ours, theirs = socket_pair()
        said: list[FromWorker] = []
        lost: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        connection = Connection(pack, decode_from_worker, said.append, lost.set_result)
        await connection.open(ours)
        theirs.sendall(frame(encode(StageBegan("a", "text"))))
        theirs.close()
        connection.send(Cancel("b"))
        async with asyncio.timeout(60):
            assert await lost is None
        assert said == [StageBegan("a", "text")]

    factory = asyncio.new_event_loop if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(scene())
