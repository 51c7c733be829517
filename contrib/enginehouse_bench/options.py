"""Options that both commands have: lengths, and the check that the server is on this machine."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import click

from enginehouse_bench.workload import Lengths, parse_lengths

__all__ = ["LengthsType", "check_is_here"]


class LengthsType(click.ParamType):
    """A length distribution."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """Parse a length distribution."""
        if isinstance(value, Lengths):
            return value
        try:
            return parse_lengths(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def check_is_here(url: str, *, allow_remote: bool) -> None:
    """Raise UsageError for a server that is not on this machine, unless that is allowed."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if not is_here and not allow_remote:
        raise click.UsageError(f"{url} is not on this machine; loading it needs --allow-remote")
