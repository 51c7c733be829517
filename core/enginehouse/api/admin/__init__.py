"""The admin API: what a server's operator asks of it while it runs. Every route needs the scope ``admin``."""

from __future__ import annotations

__all__: list[str] = []
