"""Poolers over transformers models: embeddings, cross-encoders and classifiers."""
