"""Commands that plugins add to ``enginehouse``: names and code locations. Does not know a command line library."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import matches_re

__all__ = ["OWN_COMMANDS", "Command"]

OWN_COMMANDS = ("docs", "keys", "models", "plugins", "requests", "serve")
"""Names of core's own commands, which plugins cannot use."""

_WORD = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


@frozen
class Command:
    """A command of a plugin.

    Attributes:
        name: the words that users write after ``enginehouse``. Of two words, the first is a group, which several
            plugins may extend.
        target: ``package.module:attribute`` of a click command; imported when the command is run.
        summary: one sentence, for ``enginehouse --help``, which imports nothing.
        api_version: version of this class.
    """

    name: str = field(validator=matches_re(rf"{_WORD}( {_WORD})?"))
    target: str = field(validator=matches_re(r"[\w.]+:\w+"))
    summary: str
    api_version: int = 1
