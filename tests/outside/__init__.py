"""Clients and suites of other projects, against a server that is started as users start it."""
