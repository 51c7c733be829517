"""The serving engine: scheduling, prefix reuse, sampling, constraints, and the worker that hosts them."""
