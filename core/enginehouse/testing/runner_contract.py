"""The contract of a runner as a test class. A backend author writes one fixture and inherits the tests.

::

    pytest.register_assert_rewrite("enginehouse.testing")  # in conftest.py, for readable failures

    class TestMyRunner(RunnerContract):
        @pytest.fixture(scope="class")
        @classmethod
        def make_runner(cls):
            return lambda: MyRunner(small_model, cache_tokens=512)

``make_runner`` gives a function that opens a fresh runner. It has class scope or wider; a fixture of the module
works too. The runner needs at least four sequences, batches of 32 tokens and a cache of about 200; a cache of at
most ``max_fill_tokens`` and a context shorter than the cache let all tests run (others are skipped and say why).
Nearly all tests share one runner and give back what they took. Tolerances are class attributes, see
:class:`enginehouse.testing.contract.base.ContractBase`.
"""

from __future__ import annotations

from enginehouse.testing.contract.failures import FailureContract
from enginehouse.testing.contract.forward import ForwardContract
from enginehouse.testing.contract.sequences import SequenceContract
from enginehouse.testing.contract.tokenizer import TokenizerContract

__all__ = ["RunnerContract"]


class RunnerContract(TokenizerContract, SequenceContract, ForwardContract, FailureContract):
    """Every promise of :class:`enginehouse.backend.Runner` that can be tested from outside."""
