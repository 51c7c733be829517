"""The pipeline of a request: its model, its parameters, its prompt, and the engine that answers it."""
