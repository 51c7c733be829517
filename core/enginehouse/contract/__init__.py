"""The contract: everything that authors of plugins import, and the values that cross rooms. Imports nothing of ours."""
