"""Pooling models: texts to inputs, passes over the inputs of several requests, rows to embeddings and scores."""
