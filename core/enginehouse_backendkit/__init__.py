"""Parts for backends: what several of them need beside the contract, and core does not."""
