"""The contract of a runner as a test class. A backend author writes one fixture and inherits the tests.

::

    class TestMyRunner(RunnerContract):
        @pytest.fixture(scope="class")
        @classmethod
        def model(cls):
            return ModelUnderTest(backend=MyBackend(), source=ModelSource("small"), options=MyOptions(context=64))

A fixture of the module works too, and so does a fixture ``make_runner``, a function that opens a fresh runner, where no
backend opens it. The runner needs at least four sequences, batches of 32 tokens and a cache of about 200; a cache of
at most ``max_fill_tokens`` and a context shorter than the cache let all tests run (others are skipped and say why).
Nearly all tests share one runner and give back what they took. Tolerances are class attributes, see
:class:`enginehouse_testkit.contract.base.ContractBase`.
"""

from __future__ import annotations

from enginehouse_testkit.contract.exits import ExitsContract
from enginehouse_testkit.contract.failures import FailureContract
from enginehouse_testkit.contract.forward import ForwardContract
from enginehouse_testkit.contract.sequences import SequenceContract
from enginehouse_testkit.contract.states import StateContract
from enginehouse_testkit.contract.tokenizer import TokenizerContract

__all__ = ["RunnerContract"]


class RunnerContract(
    TokenizerContract, SequenceContract, StateContract, ForwardContract, ExitsContract, FailureContract
):
    """Every promise of :class:`enginehouse.contract.backend.Runner` that can be tested from outside."""
