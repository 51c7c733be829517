"""Request field names mean one thing: core's own and those that plugins may declare."""

from __future__ import annotations

import pytest
from attrs import field, frozen

from enginehouse.contract.fields import FIELDS
from enginehouse.contract.refusals import NAMES, REFUSED, refuse
from enginehouse.contract.rows import fields_of
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings


def test_plugins_cannot_take_names_of_fields_and_can_take_those_that_they_are_refused_for() -> None:
    assert FIELDS.keys() < NAMES
    assert {"peft", "functions", "logits_processors"} <= NAMES
    assert NAMES.isdisjoint(("typical_p", "bad_words", "length_penalty"))


def test_every_row_is_described() -> None:
    assert [name for name, row in FIELDS.items() if not row.text] == []


@pytest.mark.parametrize(
    ("name", "value", "is_off"),
    [
        ("tools", [], True),
        ("tools", [1], False),
        ("parallel_tool_calls", False, True),
        ("best_of", 1, True),
        ("best_of", True, False),
        ("reasoning", {"effort": None}, True),
        ("prompt", "", False),
        ("verbosity", "low", False),
    ],
)
def test_values_without_effect_are_not_refused(name: str, value: object, is_off: bool) -> None:
    assert REFUSED[name].is_off(value) is is_off


def test_a_refusal_says_which_endpoint_takes_the_field() -> None:
    assert refuse("messages").message == "messages: only chats take this parameter"
    assert refuse("echo").message == "echo: only /v1/completions takes this parameter"
    assert refuse("x.y").message == "x.y: this server does not support this parameter yet"


def test_first_party_samplers_declare_fields_that_are_off_by_default() -> None:
    registry = PluginRegistry.load(PluginsSettings())

    assert registry.request_fields
    for sampler in registry.samplers.values():
        assert sampler.create(sampler.request_fields()) is None


@frozen(kw_only=True)
class Fields:
    """Two fields."""

    heat: float = field(default=0.0)
    spices: "tuple[str, ...]" = ()


def test_fields_of_resolves_types() -> None:
    found = {declared.name: declared.attribute.type for declared in fields_of(Fields, "hot", "kitchen")}

    assert found == {"heat": float, "spices": tuple[str, ...]}


def test_fields_of_refuses_other_classes() -> None:
    with pytest.raises(ValueError, match="attrs class"):
        fields_of(dict, "hot", "kitchen")
