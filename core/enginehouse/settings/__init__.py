"""Settings: all settings classes, their sources, and strict validation."""
