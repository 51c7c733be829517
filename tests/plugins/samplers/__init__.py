"""Tests of the sampler plugins, against a slow reference."""
