"""Request pipeline: resolves the model, merges parameters, renders the prompt and submits it to an engine."""
