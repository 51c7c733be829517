"""Text in the worker: prompts to token ids, and token ids to text, stop strings and whole characters."""
