"""Generation requests and calls of all surfaces, from the decoded body to the written response."""
