"""Contract of a sampler's request fields: described, validated, and off by default."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import attrs
import pytest

from enginehouse.contract.sampler import SamplerPlugin, SamplerRole, role_of
from enginehouse.contract.types import SamplingParams
from enginehouse.settings.structuring import strict_converter
from enginehouse_testkit.contract.sampler_base import SamplerContractBase

__all__ = ["SamplerFieldContract"]

_WRONG: dict[type, tuple[Any, ...]] = {
    bool: (1, "true"),
    int: (True, 1.5, "1"),
    float: (True, "1.0", math.nan),
    str: (1, True),
}
"""Values of a wrong type, by the type of the default."""


class SamplerFieldContract(SamplerContractBase):
    """The request fields of a sampler."""

    def test_its_role_exists(self, sampler: SamplerPlugin) -> None:
        """Logits processors are plugins of their own kind."""
        roles = set(get_args(SamplerRole)) - {"processor"}
        assert role_of(sampler) in roles, f"role is {role_of(sampler)!r}; it must be one of {', '.join(sorted(roles))}"

    def test_fields_say_what_they_mean(self, sampler: SamplerPlugin) -> None:
        """The description is part of the API's documentation."""
        for attribute in attrs.fields(sampler.request_fields):
            assert attribute.metadata.get("description"), f"{attribute.name} has no description"

    def test_defaults_are_off(self, sampler: SamplerPlugin) -> None:
        """A request without the fields gives the same tokens as without the plugin."""
        assert sampler.create(sampler.request_fields()) is None
        written = json.loads(json.dumps(attrs.asdict(sampler.request_fields())))  # as in a client's request
        off = SamplingParams(seed=9, extensions={sampler.name: written})

        assert self.drawn(sampler, off) == self.drawn(sampler, SamplingParams(seed=9))

    def test_values_of_another_kind_are_refused(self, sampler: SamplerPlugin) -> None:
        """Values are not coerced, and NaN is refused."""
        for attribute in attrs.fields(sampler.request_fields):
            for wrong in _WRONG.get(type(attribute.default), ()):
                with pytest.raises(Exception, match=r"\S"):
                    _structure(sampler, {attribute.name: wrong})

    def test_numbers_out_of_range_are_refused(self, sampler: SamplerPlugin) -> None:
        """Every number has a bound on at least one side."""
        for attribute in attrs.fields(sampler.request_fields):
            if type(attribute.default) in (int, float):
                kind = type(attribute.default)
                assert any(_is_refused(sampler, attribute.name, kind(value)) for value in (-(10**9), 10**9)), (
                    f"{attribute.name} takes any number"
                )

    def test_values_that_switch_it_on_are_taken(self, sampler: SamplerPlugin, requests: list[SamplingParams]) -> None:
        """Each request of the suite creates a step."""
        for params in requests:
            fields = _structure(sampler, params.extensions[sampler.name])
            assert sampler.create(fields) is not None, f"{params.extensions} leaves the sampler off"


def _structure(sampler: SamplerPlugin, values: dict[str, Any]) -> Any:
    return strict_converter().structure(values, sampler.request_fields)


def _is_refused(sampler: SamplerPlugin, name: str, value: Any) -> bool:
    try:
        _structure(sampler, {name: value})
    except Exception:  # noqa: BLE001 - validators may raise any exception
        return True
    return False
