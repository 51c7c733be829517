"""Contract suite for engines, as a test class: requests in, events out.

::

    class TestMyEngine(EngineContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions(context=64))

A backend that opens runners is tested with core's engine, which shows how its model behaves in batches, with every
sampling parameter and under cancellation. Settings are class attributes, see
:class:`enginehouse_testkit.contract.engine_base.EngineContractBase`.
"""

from __future__ import annotations

from enginehouse_testkit.contract.engine_events import EngineEventContract
from enginehouse_testkit.contract.engine_lifetime import EngineLifetimeContract
from enginehouse_testkit.contract.engine_parameters import EngineParameterContract

__all__ = ["EngineContract"]


class EngineContract(EngineEventContract, EngineParameterContract, EngineLifetimeContract):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.engine.Engine`."""
