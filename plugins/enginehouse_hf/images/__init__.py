"""Images in prompts through the vision tower of a transformers model: what stands for one, and its embeddings."""
