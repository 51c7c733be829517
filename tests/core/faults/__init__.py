"""What breaks, and what clients see of it."""
