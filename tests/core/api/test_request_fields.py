"""Request field names mean one thing: core's own and those that plugins may declare."""

from __future__ import annotations

import attrs
import pytest
from attrs import field, frozen

from enginehouse.api.openai.chat import ChatBody
from enginehouse.api.openai.completions import CompletionBody
from enginehouse.contract.request_fields import CORE_FIELDS, fields_of
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_core_fields_hold_every_field_of_the_endpoints(body: type) -> None:
    assert {attribute.name for attribute in attrs.fields(body)} <= CORE_FIELDS


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
