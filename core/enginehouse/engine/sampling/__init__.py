"""Sampling: from a row of logits to one token."""
