"""Contract suite for runners, as a test class. A backend author writes one fixture and inherits the tests.

::

    class TestMyRunner(RunnerContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions(context=64))

A module-level fixture works too, as does a fixture ``make_runner``, a function that opens a new runner, for runners
without a backend. The runner needs at least four sequences, batches of 32 tokens and a cache of about 200; all tests
run if the cache has at most ``max_fill_tokens`` and the context is shorter than the cache (otherwise some are skipped
with a reason). Nearly all tests share one runner and free what they opened. Tolerances are class attributes, see
:class:`enginehouse_testkit.contract.base.ContractBase`.
"""

from __future__ import annotations

from enginehouse_testkit.contract.checkpoints import CheckpointContract
from enginehouse_testkit.contract.exits import ExitsContract
from enginehouse_testkit.contract.failures import FailureContract
from enginehouse_testkit.contract.forward import ForwardContract
from enginehouse_testkit.contract.sequences import SequenceContract
from enginehouse_testkit.contract.states import StateContract
from enginehouse_testkit.contract.tokenizer import TokenizerContract

__all__ = ["RunnerContract"]


class RunnerContract(
    TokenizerContract,
    SequenceContract,
    CheckpointContract,
    StateContract,
    ForwardContract,
    ExitsContract,
    FailureContract,
):
    """Tests every externally observable guarantee of :class:`enginehouse.contract.backend.Runner`."""
