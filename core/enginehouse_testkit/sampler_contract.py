"""Contract suite for sampler plugins, as a test class.

::

    class TestMySampler(SamplerContract):
        active = ({"my_strength": 0.5}, {"my_strength": 2.0, "temperature": 0.7})

        @pytest.fixture(scope="class")
        @classmethod
        def sampler(cls):
            return MySampler()

``active`` are request fields that enable it; without any the suite tries values that the plugin's validators allow.
"""

from __future__ import annotations

from enginehouse_testkit.contract.sampler_fields import SamplerFieldContract
from enginehouse_testkit.contract.sampler_replay import SamplerReplayContract
from enginehouse_testkit.contract.sampler_steps import SamplerStepContract

__all__ = ["SamplerContract"]


class SamplerContract(SamplerFieldContract, SamplerStepContract, SamplerReplayContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.sampler.SamplerPlugin`."""
