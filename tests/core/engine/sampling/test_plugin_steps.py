import numpy as np
import pytest
from attrs import field, frozen, validators

from enginehouse.contract.errors import GenerationFailed, InvalidRequest
from enginehouse.contract.sampler import TokenPenalties
from enginehouse.contract.types import SamplingParams
from enginehouse.engine.sampling.plugin_steps import build_steps
from enginehouse.engine.sampling.sampler import SequenceSampler

VOCAB_SIZE = 200
ROW = np.random.default_rng(0).normal(0, 3, VOCAB_SIZE).astype(np.float32)


@frozen
class Fields:
    keep: int = field(default=0, validator=validators.ge(0))
    share: float = 0.5
    label: str = "x"


class Recorder:
    """A sampler plugin that remembers what it saw and keeps the first ``keep`` candidates."""

    api_version = 1
    request_fields = Fields

    def __init__(self, name="recorder", order=20, step=None):
        self.name, self.order, self.step = name, order, step
        self.seen = []

    def create(self, fields):
        if fields.label == "broken":
            raise RuntimeError("no such label")
        if not fields.keep:
            return None
        self.fields = fields
        return self.step or self._keep_first

    def _keep_first(self, candidates):
        self.seen.append(candidates)
        return np.arange(len(candidates.token_ids)) < self.fields.keep


def sampler_with(*plugins, fields=None, **params):
    extensions = {plugin.name: fields or {"keep": 3} for plugin in plugins}
    params = SamplingParams(extensions=extensions, **params)
    steps = build_steps(params, {plugin.name: plugin for plugin in plugins})
    return SequenceSampler(params, choice=0, vocab_size=VOCAB_SIZE, steps=steps)


def test_plugin_step_sees_what_earlier_steps_left():
    """Order 20 is between top-k (10) and top-p (30)."""
    plugin = Recorder(order=20)
    sampler_with(plugin, top_k=7, top_p=0.01).sample(ROW.copy(), 0)

    assert plugin.seen[0].token_ids.tolist() == np.argsort(-ROW)[:7].tolist()

    plugin = Recorder(order=35)
    sampler_with(plugin, top_k=7, top_p=0.01).sample(ROW.copy(), 0)
    assert len(plugin.seen[0].token_ids) == 1


def test_plugin_step_before_top_k_sees_the_whole_row():
    """Top-k then takes from what is left."""
    plugin = Recorder(order=5)
    sampler = sampler_with(plugin, fields={"keep": 50}, top_k=1)

    assert sampler.sample(ROW.copy(), 0).token_id == ROW.argmax()
    assert len(plugin.seen[0].token_ids) == VOCAB_SIZE


def test_candidates_are_as_promised():
    """Sorted, after temperature, beside the row before it, which cannot be changed."""
    plugin = Recorder()
    sampler_with(plugin, temperature=0.5, logit_bias={3: 5.0}).sample(ROW.copy(), 0)
    candidates = plugin.seen[0]
    changed = ROW.copy()
    changed[3] += 5

    assert candidates.temperature == 0.5
    assert candidates.token_ids.dtype == np.int32
    np.testing.assert_array_equal(candidates.row, changed)
    np.testing.assert_array_equal(candidates.logits, changed[candidates.token_ids] / np.float32(0.5))
    assert (np.diff(candidates.logits) <= 0).all()
    with pytest.raises(ValueError, match="read-only"):
        candidates.row[0] = 0


def test_uniform_numbers_of_a_plugin_can_be_replayed_and_are_its_own():
    first, second = Recorder("first"), Recorder("second", order=50)
    sampler = sampler_with(first, second, seed=5)
    for position in (0, 0, 1):
        sampler.sample(ROW.copy(), position)
    numbers = [plugin.seen[index].uniform("a") for plugin in (first, second) for index in range(3)]

    assert numbers[0] == numbers[1]
    assert numbers[3] == numbers[4]
    assert len(set(numbers)) == 4
    assert first.seen[0].uniform("b") != numbers[0]


def test_steps_run_by_order_then_name():
    plugins = [Recorder("late", 60), Recorder("b", 20), Recorder("a", 20)]
    params = SamplingParams(extensions={plugin.name: {"keep": 1} for plugin in plugins})
    steps = build_steps(params, {plugin.name: plugin for plugin in plugins})

    assert [step.plugin for step in steps] == ["a", "b", "late"]


def test_plugin_that_is_off_adds_no_step():
    assert build_steps(SamplingParams(extensions={"recorder": {}}), {"recorder": Recorder()}) == ()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"keep": "3"}, "keep: must be a whole number"),
        ({"keep": True}, "keep: must be a whole number"),
        ({"share": "a"}, "share: must be a number"),
        ({"kep": 3}, "kep: unknown"),
        ({"keep": -1}, "keep: must be >= 0"),
        ({"label": "broken"}, "failed in create"),
    ],
)
def test_build_steps_names_the_plugin_when_its_fields_are_wrong(fields, problem):
    with pytest.raises(GenerationFailed, match=problem) as caught:
        build_steps(SamplingParams(extensions={"recorder": fields}), {"recorder": Recorder()})

    assert "'recorder'" in caught.value.message


def test_build_steps_names_a_plugin_that_is_missing():
    with pytest.raises(GenerationFailed, match="'absent' is not installed") as caught:
        build_steps(SamplingParams(extensions={"absent": {}}), {})

    assert "'absent'" in caught.value.message


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda candidates: 1 / 0, "failed in its step"),
        (lambda candidates: np.zeros(len(candidates.token_ids), np.bool_), "left no token"),
        (lambda candidates: np.ones(3, np.bool_), "shape"),
        (lambda candidates: np.ones(len(candidates.token_ids)), "float64"),
        (lambda candidates: None, "object"),
    ],
)
def test_misbehaving_step_fails_its_request_and_is_named(step, problem):
    with pytest.raises(GenerationFailed, match=problem) as caught:
        sampler_with(Recorder(step=step)).sample(ROW.copy(), 0)

    assert "'recorder'" in caught.value.message


class Penalising:
    """A sampler plugin whose steps are what it is told."""

    api_version = 1
    request_fields = Fields

    def __init__(self, step, role="penalty", name="penalising", order=-10):
        self.step, self.role, self.name, self.order = step, role, name, order

    def create(self, fields):
        return self.step


class Amounts:
    """A penalty step that gives what it is told, and remembers what it saw."""

    def __init__(self, token_ids, amounts):
        self.penalised = TokenPenalties(np.array(token_ids), np.array(amounts))
        self.histories = []

    def penalties(self, history):
        self.histories.append((history.token_ids.tolist(), history.token_bytes))
        return self.penalised


def penalised_sampler(step, token_bytes=(), **params):
    params = SamplingParams(extensions={"penalising": {}}, **params)
    steps = build_steps(params, {"penalising": Penalising(step)})
    return SequenceSampler(
        params, choice=0, vocab_size=VOCAB_SIZE, prompt_token_ids=[4, 5], steps=steps, token_bytes=token_bytes
    )


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_penalties_of_a_plugin_lower_logits_before_everything_else(temperature):
    best, second = np.argsort(-ROW)[:2]
    step = Amounts([best, 0], [float(ROW[best] - ROW[second]) + 1, 1.0])
    sampler = penalised_sampler(step, temperature=temperature)

    assert sampler.sample(ROW.copy(), 0).token_id == second


def test_penalty_step_sees_prompt_and_answer_as_they_grow():
    token_bytes = tuple(b"%d" % token_id for token_id in range(VOCAB_SIZE))
    step = Amounts([], [])
    sampler = penalised_sampler(step, token_bytes)
    sampler.sample(ROW.copy(), 0)
    answer = [token_id % VOCAB_SIZE for token_id in range(300)]
    for token_id in answer:
        sampler.accept(token_id)
    sampler.sample(ROW.copy(), 3)

    assert [token_ids for token_ids, _ in step.histories] == [[4, 5], [4, 5, *answer]]
    assert all(seen is token_bytes for _, seen in step.histories)


@pytest.mark.parametrize(
    ("token_ids", "amounts", "problem"),
    [
        ([0, VOCAB_SIZE], [1.0, 1.0], "outside the vocabulary"),
        ([-1], [1.0], "outside the vocabulary"),
        ([0], [np.inf], "not finite"),
        ([0], [np.nan], "not finite"),
        ([0, 1], [1.0], "shape"),
        ([0.5], [1.0], "integers"),
    ],
)
def test_penalties_that_are_wrong_fail_the_request(token_ids, amounts, problem):
    with pytest.raises(GenerationFailed, match=problem) as caught:
        penalised_sampler(Amounts(token_ids, amounts)).sample(ROW.copy(), 0)

    assert "'penalising'" in caught.value.message


class Heat:
    """A temperature step that gives what it is told, and remembers what it saw."""

    def __init__(self, value):
        self.value = value
        self.seen = []

    def temperature(self, logits, temperature):
        self.seen.append((np.sort(logits), temperature))
        return self.value


def heated_sampler(step, **params):
    params = SamplingParams(extensions={"heat": {}}, **params)
    steps = build_steps(params, {"heat": Penalising(step, "temperature", "heat", 0)})
    return SequenceSampler(params, choice=0, vocab_size=VOCAB_SIZE, steps=steps)


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"top_p": 0.9}, {"top_k": 9, "min_p": 0.1}], ids=str)
def test_temperature_of_a_plugin_takes_the_place_of_cores(params):
    step = Heat(0.5)
    sampler = heated_sampler(step, temperature=1.5, seed=3, **params)
    plain = SequenceSampler(SamplingParams(temperature=0.5, seed=3, **params), choice=0, vocab_size=VOCAB_SIZE)

    for position in range(50):
        assert sampler.sample(ROW.copy(), position).token_id == plain.sample(ROW.copy(), position).token_id
    np.testing.assert_array_equal(step.seen[0][0], np.sort(ROW))
    assert step.seen[0][1] == 1.5


def test_temperature_step_sees_the_tokens_that_can_be_drawn():
    step = Heat(0.0)  # all but greedy
    row = ROW.copy()
    row[:50] = -np.inf
    sampler = heated_sampler(step, samplers=("top_k", "temperature"), top_k=9)

    assert sampler.sample(row.copy(), 0).token_id == row.argmax()
    assert step.seen[0][0].tolist() == sorted(row)[-9:]
    heated_sampler(step).sample(row, 0)
    assert len(step.seen[1][0]) == VOCAB_SIZE - 50


def test_greedy_asks_no_plugin_for_a_temperature():
    step = Heat(2.0)

    assert heated_sampler(step, temperature=0.0).sample(ROW.copy(), 0).token_id == ROW.argmax()
    assert not step.seen


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf, "1", None, True + 0j])
def test_temperature_that_is_none_fails_the_request(value):
    with pytest.raises(GenerationFailed, match="a finite number of at least 0 was expected") as caught:
        heated_sampler(Heat(value)).sample(ROW.copy(), 0)

    assert "'heat'" in caught.value.message


def test_two_plugins_cannot_both_set_the_temperature():
    params = SamplingParams(extensions={"a": {}, "b": {}})
    plugins = {name: Penalising(Heat(1.0), "temperature", name) for name in ("a", "b")}

    with pytest.raises(InvalidRequest, match="a and b cannot both set the temperature"):
        build_steps(params, plugins)


@pytest.mark.parametrize("role", ["penalty", "temperature", "truncation", "replacement"])
def test_step_that_does_not_suit_its_role_is_refused(role):
    with pytest.raises(GenerationFailed, match="create gave object, "):
        build_steps(SamplingParams(extensions={"penalising": {}}), {"penalising": Penalising(object(), role)})


class Follower:
    """A truncation step that keeps two candidates and remembers what it was told."""

    def __init__(self, fails=False):
        self.told, self.fails = [], fails

    def __call__(self, candidates):
        return np.arange(len(candidates.token_ids)) < 2

    def accept(self, token_id, probability):
        if self.fails:
            raise RuntimeError("no more")
        self.told.append((token_id, probability))


def following_sampler(step, **params):
    params = SamplingParams(extensions={"follower": {}}, **params)
    steps = build_steps(params, {"follower": Penalising(step, "truncation", "follower", 50)})
    return SequenceSampler(params, choice=0, vocab_size=VOCAB_SIZE, steps=steps)


def test_following_step_hears_of_every_token_and_its_probability():
    """Drawn ones with the probability that all steps together left, others without."""
    step = Follower()
    sampler = following_sampler(step, temperature=2.0, seed=1)
    weights = np.exp(np.sort(ROW)[::-1][:2].astype(np.float64) / 2)
    shares = dict(zip(np.argsort(-ROW)[:2].tolist(), weights / weights.sum(), strict=True))
    drawn = []
    for position in range(20):
        drawn.append(sampler.sample(ROW.copy(), position).token_id)
        sampler.accept(drawn[-1])
    sampler.accept(7)  # forced
    sampler.sample(ROW.copy(), 21)
    sampler.accept(8)  # not what was drawn

    assert set(drawn) == set(shares)
    assert [token_id for token_id, _ in step.told] == [*drawn, 7, 8]
    assert [probability for _, probability in step.told[:20]] == pytest.approx([shares[token] for token in drawn])
    assert [probability for _, probability in step.told[20:]] == [None, None]


def test_following_step_hears_no_probability_when_greedy():
    step = Follower()
    sampler = following_sampler(step, temperature=0.0)
    sampler.accept(sampler.sample(ROW.copy(), 0).token_id)

    assert step.told == [(int(ROW.argmax()), None)]


def test_following_step_that_fails_is_named():
    sampler = following_sampler(Follower(fails=True))
    with pytest.raises(GenerationFailed, match="failed in accept") as caught:
        sampler.accept(1)

    assert "'follower'" in caught.value.message
