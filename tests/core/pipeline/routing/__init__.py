"""Which models are tried for a request: plans, attempts, and how models have fared."""
