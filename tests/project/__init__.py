"""Guards of the repository itself: layout, hooks, documents, package, examples."""
