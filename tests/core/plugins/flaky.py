"""A plugin that breaks at a chosen place, of every kind; the fixtures of this folder install it as ``flaky_kit``.

The file ``$FLAKY_DEED`` says where and how, as in ``router.route raise``: the method raises, exits, interrupts,
ends its process, returns a wrong type, is slow, or hangs until the file says something else.
"""

import functools
import inspect
import os
import sys
import time
from pathlib import Path

import numpy as np
from attrs import frozen

import enginehouse
from enginehouse.contract.drafter import Draft
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.identity import Identity
from enginehouse.contract.parsers import AnswerText, PreparedChat
from enginehouse.contract.preparer import Preparation, Report
from enginehouse.contract.router import Attempt, RoutingDecision
from enginehouse.contract.surface import NDJSON, GenerationRoute, Reply, ReplyRoute, new_id
from enginehouse.contract.types import Constraint, GenerateRequest, Message
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions, FakeRunner
from enginehouse_testkit.inline_engine import InlineEngine

FILE = Path(os.environ["FLAKY_DEED"])
SLOW_S = 0.3
WRONG = "a string"


def deed_at(place):
    found, _, deed = FILE.read_text().rpartition(" ")
    return deed if found == place else ""


def act(place):
    """Do what the file says for this place; True if the result is to be wrong."""
    deed = deed_at(place)
    if deed == "raise":
        raise KeyError("a secret of the plugin")
    if deed == "refuse":
        raise InvalidRequest("flaky_step: at most 3 words", "flaky_step")
    if deed == "exit":
        sys.exit(3)
    if deed == "interrupt":
        raise KeyboardInterrupt
    if deed == "end":
        os._exit(7)
    if deed == "slow":
        time.sleep(SLOW_S)
    while deed_at(place) == "hang":
        time.sleep(0.02)
    return deed == "type"


def breaks(place):
    """Let a function break at a place."""

    def wrap(function):
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*arguments, **named):
                return WRONG if act(place) else await function(*arguments, **named)

            return call_async

        @functools.wraps(function)
        def call(*arguments, **named):
            return WRONG if act(place) else function(*arguments, **named)

        return call

    return wrap


@frozen
class NoOptions:
    pass


@frozen
class SamplerFields:
    flaky_step: bool = False


@frozen
class ProcessorFields:
    flaky_process: bool = False


@frozen
class PreparerFields:
    flaky_prepare: bool = False


class Flaky:
    name, api_version, options = "flaky", 1, NoOptions


class Sampler(Flaky):
    request_fields, order = SamplerFields, 55

    @breaks("sampler.create")
    def create(self, fields):
        return self.step if fields.flaky_step else None

    @breaks("sampler.its step")
    def step(self, candidates):
        return np.ones(len(candidates.token_ids), np.bool_)


class Processor(Flaky):
    name = "flaky_processor"
    request_fields = ProcessorFields

    @breaks("logits processor.create")
    def create(self, fields):
        return self if fields.flaky_process else None

    def process(self, logits, history):
        if act("logits processor.process"):
            logits[:] = float("nan")


class Decoder(Flaky):
    kinds = frozenset({"choice", "composition"})

    @breaks("structured decoder.bind")
    def bind(self, tokenizer):
        self.tokenizer = tokenizer
        return self

    @breaks("structured decoder.compile")
    def compile(self, constraint):
        return self

    @breaks("structured decoder.start")
    def start(self):
        return self

    def fill_bitmask(self, bitmask):
        act("structured decoder.fill_bitmask")
        bitmask[:] = -1

    def accept(self, token_id):
        act("structured decoder.accept")

    @breaks("structured decoder.forced_token_ids")
    def forced_token_ids(self):
        return ()

    @breaks("structured decoder.is_finished")
    def is_finished(self):
        return False


class Drafter(Flaky):
    is_free, prior = True, 0.5

    @breaks("drafter.bind")
    def bind(self, context, options):
        return self

    @breaks("drafter.open")
    def open(self, prompt, prediction):
        return self

    @breaks("drafter.propose")
    def propose(self, tasks):
        return [Draft([65]) for _ in tasks]

    def close(self, session):
        act("drafter.close")

    def shutdown(self):
        act("drafter.shutdown")


class Exit(Flaky):
    layers = (2,)

    @breaks("exit policy.bind")
    def bind(self, context, options):
        return self

    @breaks("exit policy.leaves")
    def leaves(self, view):
        return np.zeros(len(view.hidden), np.bool_)


class Tools(Flaky):
    markers = ()

    @breaks("tool parser.match")
    def match(self, model):
        return 0.0

    @breaks("tool parser.bind")
    def bind(self, model):
        return self

    @breaks("tool parser.prepare")
    def prepare(self, messages, tools):
        return PreparedChat(messages)

    @breaks("tool parser.constraint")
    def constraint(self, tools, parallel, answer=None):
        return Constraint(kind="choice", text="[]", param="tools")

    @breaks("tool parser.open")
    def open(self, tools):
        return self

    @breaks("tool parser.push")
    def push(self, text):
        return [AnswerText(text)]

    @breaks("tool parser.flush")
    def flush(self, is_cut):
        return []


class Reasoning(Flaky):
    start, end, has_switch = "<why>", "</why>", False

    @breaks("reasoning parser.match")
    def match(self, model):
        return 0.0

    @breaks("reasoning parser.bind")
    def bind(self, model):
        return self

    @breaks("reasoning parser.variables")
    def variables(self, enabled, effort):
        return {}

    @breaks("reasoning parser.is_open")
    def is_open(self, prompt):
        return False

    def open(self, is_open):
        return WRONG if act("reasoning parser.open") else ReasoningSession()


class ReasoningSession:
    @breaks("reasoning parser.push")
    def push(self, text):
        return [AnswerText(text)]

    @breaks("reasoning parser.flush")
    def flush(self, is_cut):
        return []


class Router(Flaky):
    @breaks("router.route")
    def route(self, question):
        return RoutingDecision(attempts=(Attempt("broken"),), reason="as always")


class Compressor(Flaky):
    is_budgeted = is_idempotent = True
    needs_scores = False

    @breaks("compressor.compress")
    def compress(self, task, tools):
        return [text.protected for text in task.texts]


class Preparer(Flaky):
    name = "flaky_preparer"
    request_fields = PreparerFields

    def bind(self, settings, objects):
        return self

    @breaks("preparer.may_prepare")
    def may_prepare(self, request, model):
        return True

    async def prepare_request(self, request, model, num_excess):
        if not request.extensions.get("flaky_preparer"):
            return None
        return WRONG if act("preparer.prepare_request") else Preparation(request, Report())


@frozen(kw_only=True)
class Body:
    model: str | None = None
    stream: bool = False
    max_tokens: int = 6


class Assembler:
    def __init__(self):
        self.said = []

    @breaks("surface.opening")
    def opening(self):
        return ()

    @breaks("surface.push")
    def push(self, piece):
        self.said.append(piece.text)
        return ({"say": piece.text},) if piece.text else ()

    @breaks("surface.close")
    def close(self, usage, details):
        return ()

    @breaks("surface.fail")
    def fail(self, error):
        return ({"problem": error.message},)

    @breaks("surface.whole")
    def whole(self, usage, details):
        return {"say": "".join(self.said)}


@breaks("surface.requests")
def requests(call):
    messages = (Message(role="user", content="Hello"),)
    stopping, sampling = {"max_tokens": call.body.max_tokens}, {"temperature": 0}
    return [
        GenerateRequest(
            request_id=new_id("x-"), model=call.body.model, messages=messages, stopping=stopping, sampling=sampling
        )
    ]


@breaks("surface.assemble")
async def assemble(call, answer):
    return Assembler()


@breaks("surface.handle")
async def handle(call):
    return Reply({"fine": True})


async def chunks():
    yield {"n": 1}
    yield WRONG if act("surface.stream of its reply") else {"n": 2}


async def stream(call):
    return Reply(stream=chunks(), frame=NDJSON)


class Surface(Flaky):
    request_id_header, takes_any_type = None, False
    routes = (
        GenerationRoute(
            path="/say", name="say", summary="Say", body=Body, requests=requests, assemble=assemble, frame=NDJSON
        ),
        ReplyRoute(path="/flaky", name="flaky", summary="Answer", method="GET", handle=handle),
        ReplyRoute(path="/stream", name="stream", summary="Stream", method="GET", handle=stream),
    )

    @breaks("surface.error")
    def error(self, error):
        return Reply({"problem": error.message, "code": error.code})


class Rows:
    def __init__(self, inner):
        self.inner, self.num_rows = inner, inner.num_rows

    @breaks("backend.host of its logits")
    def host(self):
        return self.inner.host()

    def select(self, rows):
        return Rows(self.inner.select(rows))


class Runner(FakeRunner):
    @breaks("backend.open_sequence")
    def open_sequence(self):
        return super().open_sequence()

    @breaks("backend.fork")
    def fork(self, source, length):
        return super().fork(source, length)

    @breaks("backend.truncate")
    def truncate(self, sequence, length):
        return super().truncate(sequence, length)

    @breaks("backend.free_tokens")
    def free_tokens(self):
        return super().free_tokens()

    def free_sequence(self, sequence):
        act("backend.free_sequence")
        super().free_sequence(sequence)

    def forward(self, spans):
        return WRONG if act("backend.forward") else Rows(super().forward(spans))


class Tokenizer:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @breaks("backend.encode of its tokenizer")
    def encode(self, text, special):
        return self.inner.encode(text, special)


@frozen(kw_only=True)
class BackendOptions(FakeOptions):
    pass


class Backend(FakeBackend):
    name, options = "flaky", BackendOptions

    @breaks("backend.probe")
    def probe(self):
        return super().probe()

    @breaks("backend.match")
    def match(self, source):
        return super().match(source)

    @breaks("backend.estimate")
    def estimate(self, source, options):
        return super().estimate(source, options)

    @breaks("backend.open")
    def open(self, source, options, progress):
        runner = Runner(options)
        runner.tokenizer = Tokenizer(runner.tokenizer)
        return runner


class Stream:
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def __aiter__(self):
        if act("backend.its stream"):
            yield WRONG
        async for batch in self.inner:
            yield batch


class OwnEngine(InlineEngine):
    @breaks("backend.submit")
    async def submit(self, request):
        return Stream(await super().submit(request))

    @breaks("backend.tokenize")
    async def tokenize(self, segments, add_special):
        return await super().tokenize(segments, add_special)


class EngineBackend(FakeBackend):
    name, options, opens = "flaky_engine", BackendOptions, "engine"

    def open(self, source, options, progress):
        return OwnEngine(FakeRunner(options))


def registering(*made):
    def hook(register):
        for one in made:
            register(one())

    return hook


_KINDS = {
    "backends": (Backend, EngineBackend),
    "samplers": Sampler,
    "logits_processors": Processor,
    "structured_decoders": Decoder,
    "drafters": Drafter,
    "exit_policies": Exit,
    "tool_parsers": Tools,
    "reasoning_parsers": Reasoning,
    "routers": Router,
    "compressors": Compressor,
    "preparers": Preparer,
    "surfaces": Surface,
}
for _kind, _made in _KINDS.items():
    globals()[f"register_{_kind}"] = enginehouse.hookimpl(specname=f"register_{_kind}")(
        registering(*(_made if isinstance(_made, tuple) else (_made,)))
    )


@enginehouse.hookimpl
def authenticate(credentials):
    if credentials.token != "flaky":
        return None
    return WRONG if act("authenticator.authenticate") else Identity(name="someone")


@enginehouse.hookimpl
def on_event(event):
    return None if act("listener.on_event") else True
