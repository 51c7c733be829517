"""Request pipeline: resolves the model, merges parameters, renders the prompt and starts it on an engine."""
