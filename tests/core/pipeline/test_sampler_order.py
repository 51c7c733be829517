"""Which sampling steps run: ``samplers``, and steps that replace others."""

import pytest
from attrs import frozen

from enginehouse.contract.errors import ConfigError, InvalidRequest
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.parameters import Layer, effective_parameters, read_defaults, step_names
from enginehouse.settings.config import LimitsSettings


@frozen
class SpiceFields:
    spice: float = 0.0


@frozen
class StormFields:
    storm: int = 0
    storm_speed: float = 1.0


@frozen
class HeatFields:
    heat: float = 0.0


@frozen
class Plugin:
    """A sampler whose step is on when its first field is."""

    name: str
    request_fields: type
    order: int
    role: str = "truncation"
    aliases: tuple[str, ...] = ()
    api_version: int = 1

    def create(self, fields):
        return object() if getattr(fields, self.name) else None


SAMPLERS = {
    "spice": Plugin("spice", SpiceFields, 20, aliases=("spc",)),
    "storm": Plugin("storm", StormFields, 70, "replacement"),
    "heat": Plugin("heat", HeatFields, 0, "temperature"),
}


def layer(**fields):
    return Layer("model", read_defaults(fields, "d", SAMPLERS))


def settle(given=None, defaults=None):
    """Effective parameters of a request that gives some fields."""
    read = read_defaults(given or {}, "request", SAMPLERS)
    request = GenerateRequest(
        request_id="r", model=None, text="x", sampling=read.sampling, stopping=read.stopping, extensions=read.extensions
    )
    return effective_parameters(request, [layer(**(defaults or {}))], 100, LimitsSettings(), SAMPLERS)


def test_names_are_those_of_the_steps():
    names = ("penalties", "temperature", "top_k", "spc", "storm", "min_p")

    assert step_names(names, SAMPLERS) == ("penalties", "temperature", "top_k", "spice", "storm", "min_p")
    assert step_names((), SAMPLERS) == ()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["top_kk"], "samplers: no such step: 'top_kk' .did you mean 'top_k'..; there are min_p, penalties, spice"),
        (["heat"], "no such step: 'heat'"),
        (["x" * 1000], "no such step: 'x{100}';"),
        (["spice", "spc"], "lists 'spice' twice"),
    ],
    ids=["misspelt", "temperature plugin", "long", "twice"],
)
def test_wrong_names_are_refused(names, problem):
    with pytest.raises(InvalidRequest, match=problem) as caught:
        step_names(names, SAMPLERS)

    assert caught.value.param == "samplers"


def test_without_a_list_everything_runs():
    found = settle({"top_p": 0.5, "spice": 1.0}, {"top_k": 7, "heat": 0.5})

    assert found.sampling.samplers is None
    assert (found.sampling.top_p, found.sampling.top_k) == (0.5, 7)
    assert found.sampling.extensions == {"spice": {"spice": 1.0}, "heat": {"heat": 0.5}}


def test_what_a_list_leaves_out_is_off_and_says_why():
    defaults = {"top_k": 7, "temperature": 0.5, "repetition_penalty": 1.2, "spice": 1.0, "heat": 0.4, "min_p": 0.1}
    found = settle({"samplers": ["min_p", "top_p"], "top_p": 0.9}, defaults)

    sampling = found.sampling
    assert sampling.samplers == ("min_p", "top_p")
    assert (sampling.top_k, sampling.temperature, sampling.repetition_penalty) == (0, 1.0, 1.0)
    assert (sampling.min_p, sampling.top_p, sampling.extensions) == (0.1, 0.9, {})
    wanted = {"top_k": "request", "temperature": "request", "spice": "request", "min_p": "model", "top_p": "request"}
    assert {name: found.origins[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0}, "temperature"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"spice": 1.0}, "spice"),
        ({"heat": 1.0}, "temperature"),
        ({"storm": 2}, "storm"),
    ],
    ids=str,
)
def test_request_cannot_ask_for_a_step_that_it_does_not_list(fields, step):
    with pytest.raises(InvalidRequest, match=f"does not list '{step}', which {next(iter(fields))} asks for") as caught:
        settle({"samplers": ["top_k"], **fields})

    assert caught.value.param == "samplers"


def test_request_may_name_a_step_that_is_off_without_listing_it():
    found = settle({"samplers": ["top_k"], "top_k": 3, "top_p": 1.0, "temperature": 1, "spice": 0.0, "storm": 0})

    assert found.sampling.samplers == ("top_k",)


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({}, ("temperature", "top_p")),
        ({"frequency_penalty": 1.0}, ("penalties", "temperature", "top_p")),
        ({"spice": 1.0}, ("temperature", "spice", "top_p")),
        ({"min_p": 0.1}, ("temperature", "top_p", "min_p")),
        ({"heat": 1.0}, ("temperature", "top_p")),
    ],
    ids=str,
)
def test_list_of_a_default_takes_the_steps_that_a_request_asks_for(given, order):
    assert settle(given, {"samplers": ["temperature", "top_p"]}).sampling.samplers == order


def test_replacement_turns_the_truncations_of_defaults_off():
    found = settle({"storm": 2}, {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "spice": 1.0, "repetition_penalty": 1.1})

    sampling = found.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    assert sampling.extensions == {"storm": {"storm": 2}}
    assert sampling.repetition_penalty == 1.1
    assert found.origins["top_k"] == "request"


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"spice": 1.0}], ids=str)
def test_request_cannot_ask_for_a_replacement_and_what_it_replaces(fields):
    field = next(iter(fields))
    with pytest.raises(InvalidRequest, match=f"{field}: not together with storm, which replaces it") as caught:
        settle({"storm": 2, **fields})

    assert caught.value.param == field


def test_truncation_of_a_request_wins_over_the_replacement_of_a_default():
    found = settle({"top_p": 0.9}, {"storm": 2, "storm_speed": 3.0, "top_k": 5})

    assert found.sampling.extensions == {}
    assert (found.sampling.top_p, found.sampling.top_k) == (0.9, 5)
    assert found.origins["storm"] == "request"


def test_replacement_that_is_off_replaces_nothing():
    found = settle({"storm_speed": 2.0, "top_p": 0.5})

    assert found.sampling.top_p == 0.5


def test_replacement_that_is_not_listed_replaces_nothing():
    found = settle({"samplers": ["top_k"], "top_k": 3}, {"storm": 2})

    assert found.sampling.top_k == 3
    assert found.sampling.extensions == {}


def test_defaults_with_unknown_steps_are_found_at_the_start():
    with pytest.raises(ConfigError, match="did you mean 'top_p'") as caught:
        read_defaults({"samplers": ["top_pp"]}, "models.a.defaults", SAMPLERS)

    assert caught.value.path == "models.a.defaults.samplers"


def test_min_tokens_must_fit_below_max_tokens():
    with pytest.raises(InvalidRequest, match="min_tokens: must be at most max_tokens, which is 3, not 4") as caught:
        settle({"min_tokens": 4, "max_tokens": 3})

    assert caught.value.param == "min_tokens"
    assert settle({"max_tokens": 3}, {"min_tokens": 4}).stopping.min_tokens == 4
    assert settle({"min_tokens": 4}).stopping.min_tokens == 4
