"""From chat messages to a prompt: sandboxed templates and segments that user text cannot escape."""
