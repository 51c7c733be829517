"""Draft heads of transformers models: EAGLE-3 heads, and layers for multi-token prediction (MTP)."""
