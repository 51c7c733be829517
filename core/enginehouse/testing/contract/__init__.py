"""The parts of the runner contract suite; use :class:`enginehouse.testing.runner_contract.RunnerContract`."""
