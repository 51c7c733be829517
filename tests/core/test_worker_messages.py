"""Messages and frames: whatever is sent arrives as it was, however the bytes are cut on the way."""

from __future__ import annotations

import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse import errors
from enginehouse.config import PluginsSettings
from enginehouse.engine.worker import messages
from enginehouse.engine.worker.link import MAX_FRAME_BYTES, FrameCutter, FrameTooLarge, Link, frame, socket_pair
from enginehouse.types import (
    ChoiceFinished,
    EngineRequest,
    EngineSettings,
    EngineStats,
    ModelInfo,
    RequestFinished,
    SamplingParams,
    Segment,
    StopParams,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
floats = st.floats(allow_nan=False)
counts = st.integers(0, 2**40)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | texts,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(texts, children, max_size=3),
    max_leaves=5,
)
tables = st.dictionaries(texts, plain, max_size=3)

sampling = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=counts,
    top_p=floats,
    logit_bias=st.dictionaries(counts, floats, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    num_logprobs=st.none() | st.integers(0, 20),
    extensions=st.dictionaries(texts, tables, max_size=2),
)
stopping = st.builds(
    StopParams,
    max_tokens=st.none() | counts,
    stop=st.lists(texts, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
segments = st.lists(st.builds(Segment, texts, st.booleans()), max_size=3).map(tuple)
requests = st.builds(
    EngineRequest,
    request_id=texts,
    segments=segments,
    token_ids=st.none() | token_ids,
    add_special=st.booleans(),
    num_choices=st.integers(1, 16),
    sampling=sampling,
    stopping=stopping,
    priority=st.integers(-100, 100),
    namespace=texts,
)
failures = st.builds(messages.Failure, tables)
top = st.lists(st.builds(TopLogprob, counts, st.binary(max_size=4), floats), max_size=2).map(tuple)
logprobs = st.lists(st.builds(TokenLogprob, counts, st.binary(max_size=4), floats, top), max_size=2).map(tuple)
events = (
    st.builds(TextDelta, st.integers(0, 15), texts, token_ids, st.none() | logprobs)
    | st.builds(ChoiceFinished, st.integers(0, 15), st.sampled_from(["stop", "length"]), counts, texts | counts)
    | st.builds(RequestFinished, counts, counts, counts, counts, queue_s=floats, prefill_s=floats, decode_s=floats)
)
infos = st.builds(
    ModelInfo,
    backend=texts,
    max_context=counts,
    vocab_size=counts,
    chat_templates=st.dictionaries(texts, texts, max_size=2),
    special_tokens=st.dictionaries(texts, counts, max_size=2),
    bos_token=texts,
    eos_token=texts,
    metadata=st.dictionaries(texts, texts, max_size=2),
)
loads = st.builds(
    messages.Load,
    texts,
    texts,
    st.none() | texts,
    tables,
    texts,
    st.builds(EngineSettings, slots=counts, max_queue=counts, prefix_cache=st.booleans()),
    st.builds(
        PluginsSettings,
        allow=st.none() | st.lists(texts, max_size=2).map(tuple),
        deny=st.lists(texts, max_size=2).map(tuple),
        options=st.dictionaries(texts, tables, max_size=2),
    ),
)
to_worker = (
    loads
    | st.builds(messages.Submit, requests)
    | st.builds(messages.Cancel, texts)
    | st.builds(messages.Tokenize, counts, segments, st.booleans())
    | st.builds(messages.Detokenize, counts, token_ids)
    | st.builds(messages.GetStats, counts)
    | st.just(messages.Close())
)
from_worker = (
    st.builds(messages.LoadProgress, floats, texts)
    | st.builds(messages.Ready, infos)
    | st.builds(messages.LoadFailed, failures)
    | st.builds(messages.Accepted, texts, counts)
    | st.builds(messages.Rejected, texts, failures)
    | st.builds(messages.StepOutputs, st.lists(st.tuples(texts, events | failures), max_size=4))
    | st.builds(messages.Tokenized, counts, token_ids.map(list))
    | st.builds(messages.Detokenized, counts, texts)
    | st.builds(messages.Stats, counts, st.builds(EngineStats, num_waiting=counts, free_tokens=counts))
    | st.builds(messages.CallFailed, counts, failures)
    | st.builds(messages.Died, texts)
)


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
    thread.join(5)

    assert results == [False]
    link.close()
