import numpy as np
import pytest
from attrs import field, frozen, validators

from enginehouse.engine.sampling import SequenceSampler
from enginehouse.engine.truncation import build_steps
from enginehouse.errors import GenerationFailed
from enginehouse.types import SamplingParams

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

    def __init__(self, name="recorder", order=20, full_row=False, step=None):
        self.name, self.order, self.full_row, self.step = name, order, full_row, step
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
    """Order 20 stands between top-k (10) and top-p (30)."""
    plugin = Recorder(order=20)
    sampler_with(plugin, top_k=7, top_p=0.01).sample(ROW.copy(), 0)

    assert plugin.seen[0].token_ids.tolist() == np.argsort(-ROW)[:7].tolist()

    plugin = Recorder(order=35)
    sampler_with(plugin, top_k=7, top_p=0.01).sample(ROW.copy(), 0)
    assert len(plugin.seen[0].token_ids) == 1


@pytest.mark.parametrize("full_row", [False, True])
def test_plugin_step_before_top_k_sees_the_whole_row(full_row):
    """Top-k then takes from what is left."""
    plugin = Recorder(order=5, full_row=full_row)
    sampler = sampler_with(plugin, fields={"keep": 50}, top_k=1)

    assert sampler.sample(ROW.copy(), 0).token_id == ROW.argmax()
    assert len(plugin.seen[0].token_ids) == VOCAB_SIZE


def test_full_row_does_not_undo_earlier_steps():
    plugin = Recorder(order=20, full_row=True)
    sampler_with(plugin, top_k=7).sample(ROW.copy(), 0)

    assert plugin.seen[0].token_ids.tolist() == np.argsort(-ROW)[:7].tolist()


def test_candidates_are_as_promised():
    """Sorted, after temperature, beside the row before it, which cannot be changed."""
    plugin = Recorder(full_row=True)
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
        ({"label": "broken"}, "no such label"),
    ],
)
def test_build_steps_names_the_plugin_when_its_fields_are_wrong(fields, problem):
    with pytest.raises(GenerationFailed, match=problem) as caught:
        build_steps(SamplingParams(extensions={"recorder": fields}), {"recorder": Recorder()})

    assert caught.value.plugin == "recorder"


def test_build_steps_names_a_plugin_that_is_missing():
    with pytest.raises(GenerationFailed, match="'absent' is not installed") as caught:
        build_steps(SamplingParams(extensions={"absent": {}}), {})

    assert caught.value.plugin == "absent"


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda candidates: 1 / 0, "ZeroDivisionError"),
        (lambda candidates: np.zeros(len(candidates.token_ids), np.bool_), "left no token"),
        (lambda candidates: np.ones(3, np.bool_), "shape"),
        (lambda candidates: np.ones(len(candidates.token_ids)), "float64"),
        (lambda candidates: None, "object"),
    ],
)
def test_misbehaving_step_fails_its_request_and_is_named(step, problem):
    with pytest.raises(GenerationFailed, match=problem) as caught:
        sampler_with(Recorder(step=step)).sample(ROW.copy(), 0)

    assert caught.value.plugin == "recorder"
