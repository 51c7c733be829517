"""Prompts are shortened where somebody wants that, and nothing is touched that must stay."""
