"""The contract: everything that plugin authors import, and values shared between packages. Imports no other package."""
