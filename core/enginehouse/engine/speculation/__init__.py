"""Speculative decoding: draft lengths, verification and acceptance."""
