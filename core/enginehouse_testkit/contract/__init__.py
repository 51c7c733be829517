"""The parts of the runner contract suite; use :class:`enginehouse_testkit.runner_contract.RunnerContract`."""
