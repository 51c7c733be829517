"""Benchmarks: Enginehouse beside its peers, each started on the same model file and driven in turn.

Run from the folder ``tests``: ``python -m bench --help``. ``docs/performance.md`` says how to measure and
what the figures mean. Nothing here is a unit test, except that of the statistics.
"""
