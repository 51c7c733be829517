"""Tests of the sampler, against a slow reference."""
