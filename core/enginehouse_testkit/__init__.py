"""Fakes and contract suites for our tests and for those of plugin authors; see the README in this folder."""
