"""Models whose sequences carry a state go back to checkpoints: what is computed again; the text is the same."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.drafter import BoundDrafter
from enginehouse.contract.errors import ModelLoadError, RunnerError, StepAborted
from enginehouse.contract.types import EngineSettings, Resume, ResumedChoice
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.prefix_cache import PrefixCache
from enginehouse.engine.reuse import INTERVAL_TOKENS, choose_places, last_place, next_place
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.messages import DrafterLoad
from enginehouse.workers.parts import bind_drafters
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import Result, alone, drive, make_engine, make_request, prompt_of

SYSTEM, QUESTION = prompt_of(1, 60), prompt_of(2, 40)
BEGIN, END = (FakeRunner().tokenizer.special_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
OPENING = [BEGIN, 65, 66]
ANSWER_TOKENS = 12


class Chat:
    """A prompt and where its messages end; ``said`` is an answer after its opening, as the model wrote it."""

    def __init__(self, *messages: list[int], said: tuple[Chat, list[int]] | None = None) -> None:
        self.token_ids = [*said[0].token_ids, *said[1], END] if said is not None else []
        self.ends = [*said[0].ends, len(self.token_ids)] if said is not None else []
        for message in messages:
            self.token_ids += [BEGIN, *message, END]
            self.ends.append(len(self.token_ids))
        self.token_ids += OPENING


def make(**options: object) -> StepEngine:
    fields = {"num_checkpoints": 32, "cache_tokens": 4096, "max_sequences": 16} | options
    return make_engine(FakeOptions(**fields))  # type: ignore[arg-type]


def ask(engine: StepEngine, *chats: Chat, **fields: object) -> list[Result]:
    """Answer chats at the same time; every text is that of an engine which answers it alone, without a cache."""
    asked = [(make_request(ANSWER_TOKENS, ignore_eos=True, **fields), chat) for chat in chats]
    results = {request.request_id: Result() for request, _ in asked}
    for request, chat in asked:
        engine.add(request, chat.token_ids)
    drive(engine, results)
    for request, chat in asked:
        assert results[request.request_id].error is None
        assert results[request.request_id].token_ids == alone(request, chat.token_ids).token_ids
    return list(results.values())


def num_cached(result: Result) -> int:
    assert result.summary is not None
    return result.summary.usage.cached_tokens


@pytest.mark.parametrize("fork", ["share", "copy"])
def test_a_conversation_computes_only_what_is_new(fork: str) -> None:
    """Turns whose answers come back as they were, and an edited message in the middle."""
    engine, chat, ends = make(fork=fork), Chat(SYSTEM, QUESTION), [0]
    for turn in range(3, 8):
        (result,) = ask(engine, chat)
        assert num_cached(result) == ends[-1], "all but the last token of the answer before, which was not computed"
        ends.append(len(chat.token_ids) + ANSWER_TOKENS - 1)
        earlier, chat = chat, Chat(prompt_of(turn, 30), said=(chat, result.token_ids[0]))

    edited = Chat(prompt_of(20, 30), said=(earlier, result.token_ids[0]))
    assert num_cached(ask(engine, edited)[0]) == ends[-1]
    assert num_cached(ask(engine, earlier)[0]) == earlier.ends[-1], "the same message again"


def test_a_turn_without_the_thoughts_of_the_last_one_goes_back_to_its_message() -> None:
    """Templates leave out what a model thought, so prompts diverge in the opening of the answer."""
    engine, chat = make(), Chat(SYSTEM, QUESTION)
    (result,) = ask(engine, chat)
    shorter = Chat(SYSTEM, QUESTION, result.token_ids[0][6:], prompt_of(3, 30))

    assert num_cached(ask(engine, shorter)[0]) == chat.ends[-1]


@pytest.mark.parametrize(
    ("message", "border"),
    [
        pytest.param(QUESTION, -1, id="the same again: up to the end of the message"),
        pytest.param([*QUESTION[:20], *prompt_of(9, 30)], -2, id="edited: up to its beginning"),
        pytest.param(prompt_of(5, 40), -2, id="another conversation: the system prompt"),
    ],
)
def test_another_last_message_goes_back_to_a_border(message: list[int], border: int) -> None:
    engine, chat = make(), Chat(SYSTEM, QUESTION)
    ask(engine, chat)

    assert num_cached(ask(engine, Chat(SYSTEM, message))[0]) == chat.ends[border]
    assert num_cached(ask(engine, chat)[0]) == chat.ends[-1], "the first one is there as before"


def test_a_chat_whose_checkpoints_were_dropped_gets_new_ones() -> None:
    engine, chat = make(num_checkpoints=4), Chat(SYSTEM, QUESTION)
    ask(engine, chat)
    for seed in range(3, 7):
        ask(engine, Chat(prompt_of(seed, 60), QUESTION))

    assert [num_cached(ask(engine, chat)[0]) for _ in range(3)] == [0, *[chat.ends[-1]] * 2]


def test_choices_share_their_prompt() -> None:
    """The prompt is computed once; the other choices compute the opening of the answer again."""
    engine = make()
    ask(engine, Chat(SYSTEM, QUESTION), num_choices=3)

    assert engine.stats().num_steps <= 3 + ANSWER_TOKENS, "one more for each message, and for the openings"


def test_conversations_at_the_same_time_compute_their_system_prompt_once() -> None:
    """Those that come while it is being computed wait for it, and start from the checkpoint after it."""
    engine = make()
    chats = [Chat(SYSTEM, prompt_of(seed, 40)) for seed in range(3, 7)]
    results = ask(engine, *chats)

    assert [num_cached(result) for result in results] == [0, *[chats[0].ends[0]] * 3]


def test_nothing_waits_for_a_checkpoint_that_was_dropped() -> None:
    """A long prompt has passed the place that a short one shares, and its only checkpoint is at a later one."""
    engine, results = make(num_checkpoints=1, max_batch_tokens=32), [Result(), Result()]
    long, short = Chat(SYSTEM, QUESTION, prompt_of(3, 1500)), Chat(SYSTEM, prompt_of(4, 40))
    requests = [make_request(1), make_request(1)]
    by_id = {request.request_id: result for request, result in zip(requests, results, strict=True)}
    engine.add(requests[0], long.token_ids)
    for _ in range(10):
        assert not engine.step()
    engine.add(requests[1], short.token_ids)
    while results[1].summary is None:
        for request_id, event in engine.step():
            by_id[request_id].take(event)

    assert results[0].summary is None, "the short one does not wait for the end of the long one"
    drive(engine, by_id)


def test_a_prompt_without_messages_is_shared_up_to_its_last_token() -> None:
    engine, prompt = make(), Chat()
    prompt.token_ids = prompt_of(3, 100)

    assert [num_cached(ask(engine, prompt)[0]) for _ in range(2)] == [0, 99]


def test_a_preempted_sequence_goes_on_with_the_same_text() -> None:
    """A small cache: sequences are preempted while they run, and start again from what is left."""
    engine = make(cache_tokens=220, slots=4)
    ask(engine, *(Chat(SYSTEM[:20], prompt_of(seed, 30)) for seed in range(3, 9)))

    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_told", [1, 5, 11])
def test_an_answer_goes_on_in_another_engine(num_told: int) -> None:
    """After a worker died: its prompt is computed again, or found, and the next turn finds the whole."""
    chat, request = Chat(SYSTEM, QUESTION), make_request(ANSWER_TOKENS, ignore_eos=True)
    whole = alone(request, chat.token_ids).token_ids[0]
    for engine in (make(), holding := make()):
        if engine is holding:
            ask(engine, chat)
        result = Result()
        engine.add(request, chat.token_ids, Resume((ResumedChoice(0, tuple(whole[:num_told])),)))
        drive(engine, {request.request_id: result})
        assert [*whole[:num_told], *result.token_ids[0]] == whole
        (turn,) = ask(engine, Chat(prompt_of(3, 30), said=(chat, whole)))
        assert num_cached(turn) == len(chat.token_ids) + ANSWER_TOKENS - 1


def test_such_models_use_no_drafters_but_draft_heads() -> None:
    """Not even one is looked for, while another model would refuse to load without it. Heads: ``plugins/hf/heads``."""
    registry = PluginRegistry.load(PluginsSettings(allow=()))
    load = DrafterLoad(name="missing", options={}, options_path="models.m.drafters.missing")

    def bind(**options: int) -> Mapping[str, BoundDrafter]:
        return bind_drafters(registry, [load], FakeRunner(FakeOptions(**options)), 1, lambda share, what: None)

    assert bind(num_checkpoints=1) == {}
    with pytest.raises(ModelLoadError, match="no drafter 'missing'"):
        bind()


def test_what_is_computed_again_gets_its_checkpoints_again() -> None:
    class Losing(FakeRunner):
        """Loses the state of a sequence when its second pass is aborted."""

        num_passes = 0

        def forward(self, spans: Sequence[Span]) -> ForwardOutput:
            self.num_passes += 1
            if self.num_passes == 2:
                self.truncate(spans[0].sequence, 0)
                raise StepAborted({spans[0].sequence: 0})
            return super().forward(spans)

    engine, chat = StepEngine(Losing(FakeOptions(num_checkpoints=8)), EngineSettings(), {}), Chat(SYSTEM, QUESTION)
    ask(engine, chat)
    assert num_cached(ask(engine, chat)[0]) == chat.ends[-1]
    assert num_cached(ask(engine, Chat(SYSTEM, prompt_of(3, 40)))[0]) == chat.ends[0]


@pytest.mark.parametrize("error", [RuntimeError("no memory for it"), RunnerError("no memory for it")], ids=repr)
def test_a_failing_checkpoint_is_only_computed_again(error: Exception) -> None:
    class Failing(FakeRunner):
        def keep_checkpoint(self, sequence: int) -> None:
            raise error

    engine = StepEngine(Failing(FakeOptions(num_checkpoints=8)), EngineSettings(), {})
    assert [num_cached(ask(engine, Chat(SYSTEM, QUESTION))[0]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_any_requests_in_any_order_give_the_text_of_each_alone(seed: int) -> None:
    """Few checkpoints, a small cache, choices and several requests at once, on both kinds of forks."""
    choose = random.Random(seed)
    engine = make(
        num_checkpoints=choose.choice((1, 4, 32)),
        cache_tokens=600,
        slots=3,
        max_batch_tokens=64,
        fork=choose.choice(("share", "copy")),
        device_sampling=choose.choice((True, False)),
    )
    known = [Chat(SYSTEM, QUESTION), Chat(QUESTION, SYSTEM)]
    for _ in range(12):
        asked = choose.sample(known, k=choose.randint(1, 2))
        for chat, result in zip(asked, ask(engine, *asked, num_choices=choose.randint(1, 2)), strict=True):
            if len(chat.token_ids) < 220:
                known.append(Chat(prompt_of(choose.randrange(9), 20), said=(chat, result.token_ids[0])))
                known.append(Chat(SYSTEM, QUESTION, result.token_ids[0][3:], prompt_of(choose.randrange(9), 20)))


def test_a_longer_sequence_replaces_its_beginning_if_it_can_go_back_there() -> None:
    runner = FakeRunner(FakeOptions(num_checkpoints=2))
    cache = PrefixCache(runner)
    for token_ids, places in (([1, 2, 3], ()), ([1, 2, 3, 4], ()), ([1, 2, 3, 4, 5, 6], (3, 4)), ([1, 2, 3], ())):
        handle = runner.open_sequence()
        for token_id in token_ids:
            runner.forward([Span(handle, runner.length(handle), np.array([token_id], np.int32))])
            if runner.length(handle) in places:
                runner.keep_checkpoint(handle)
        cache.store(np.array(token_ids, np.int32), handle, "")

    assert [view.num_tokens for view in cache.entries()] == [6]
    match = cache.match(np.array([1, 2, 3, 4, 5], np.int32), "")
    assert match is not None
    assert match.length == 4


X, E, B, C = [97], [END], [BEGIN], [FakeRunner().tokenizer.special_tokens["<|bos|>"]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param([*60 * X, *E, *40 * X, *E, *4 * X], (61, 102), id="two messages"),
        pytest.param([*(60 * X + E) * 4, *4 * X], (61, 183, 244), id="four: the first, and the last two"),
        pytest.param([*60 * X, *E, *3 * X, *E, *60 * X, *E, *4 * X], (65, 126), id="one too short to pay"),
        pytest.param([*60 * X, *E, *40 * X], (61, 100), id="an answer that is continued"),
        pytest.param([*60 * X, *E], (60,), id="nothing after the last message"),
        pytest.param([*B, *60 * X, *B, *40 * X, *B, *2 * X], (61, 102), id="only beginnings"),
        pytest.param([*(B + 60 * X + C) * 2, *B, *2 * X], (62, 124), id="beginnings, and other ends"),
        pytest.param(100 * X, (99,), id="no messages"),
        pytest.param([*30 * X, *E, *100 * X], (31, 130), id="a long text after the last message"),
        pytest.param([*B, *4 * X, *E, *B, *2 * X], (), id="too short"),
        pytest.param(X, (), id="one token"),
    ],
)
def test_places_in_a_prompt(prompt: list[int], expected: tuple[int, ...]) -> None:
    assert choose_places(np.array(prompt, np.int32), FakeRunner().tokenizer) == expected


def test_places_between_borders_are_at_intervals() -> None:
    places = (62, INTERVAL_TOKENS + 5)

    assert [next_place(places, length, 100) for length in (0, 61, 62, INTERVAL_TOKENS, 3 * INTERVAL_TOKENS - 1)] == [
        62,
        62,
        INTERVAL_TOKENS,
        INTERVAL_TOKENS + 5,
        3 * INTERVAL_TOKENS,
    ]
    assert [last_place(places, length, 100) for length in (0, 61, 62, INTERVAL_TOKENS, 2 * INTERVAL_TOKENS - 1)] == [
        0,
        0,
        62,
        INTERVAL_TOKENS,
        INTERVAL_TOKENS + 5,
    ]


@pytest.mark.parametrize(
    ("num_intervals", "distance"), [(1, 1), (8, 1), (9, 2), (17, 2), (18, 4), (33, 4), (35, 4), (36, 8), (500, 64)]
)
def test_a_long_prompt_has_eight_places_at_intervals(num_intervals: int, distance: int) -> None:
    """More in its answer, at the same distance."""
    num_tokens, length, found = num_intervals * INTERVAL_TOKENS + 9, 0, list[int]()
    while (length := next_place((), length, num_tokens)) < 2 * num_tokens:
        found.append(length)
        assert last_place((), length + 1, num_tokens) == last_place((), length, num_tokens) == length
        assert last_place((), length - 1, num_tokens) == length - distance * INTERVAL_TOKENS

    assert found[0] == distance * INTERVAL_TOKENS
    assert sum(length <= num_tokens for length in found) == num_intervals // distance <= 8


def test_a_long_prompt_leaves_the_checkpoints_of_others() -> None:
    engine = make(num_checkpoints=16, cache_tokens=10**5, context=10**5)
    chats = [Chat(SYSTEM, QUESTION), Chat(QUESTION, SYSTEM)]
    for chat in chats:
        ask(engine, chat)
    request, long = make_request(1), Chat(prompt_of(3, 18 * INTERVAL_TOKENS))
    engine.add(request, long.token_ids)
    drive(engine, {request.request_id: Result()})

    assert [num_cached(ask(engine, chat)[0]) for chat in chats] == [chat.ends[-1] for chat in chats]
