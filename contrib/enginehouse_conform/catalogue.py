"""All checks in order. Omits H20 and H23 to H26, which need knowledge of the server or its model."""

from __future__ import annotations

from enginehouse_conform import lifetime, messages, protocol, sampling, stopping, streaming, structured, tools
from enginehouse_conform.check import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            *streaming.CHECKS,
            *stopping.CHECKS,
            *sampling.CHECKS,
            *tools.CHECKS,
            *structured.CHECKS,
            *messages.CHECKS,
            *protocol.CHECKS,
            *lifetime.CHECKS,
        ),
        key=lambda check: check.behaviour,
    )
)
