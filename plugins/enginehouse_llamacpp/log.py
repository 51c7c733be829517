"""Buffers llama.cpp's log messages for use in errors. Does not know the library itself."""

from __future__ import annotations

from collections import deque

__all__ = ["LogBuffer"]

_WARNING, _ERROR, _CONTINUED = 3, 4, 5


class LogBuffer:
    """Newest warnings and errors of llama.cpp; thread-safe for writers."""

    def __init__(self, max_lines: int = 100) -> None:
        self._lines: deque[str] = deque(maxlen=max_lines)
        self._is_kept = False

    def receive(self, level: int, text: bytes, user_data: object) -> None:
        """llama.cpp's log callback; called from any thread, must not raise."""
        if level != _CONTINUED:
            self._is_kept = level in (_WARNING, _ERROR)
        if self._is_kept and text:
            self._lines.append(text.decode(errors="replace").strip())

    def clear(self) -> None:
        """Discard all messages, before an operation whose errors matter."""
        self._lines.clear()

    def reason(self, max_lines: int = 4) -> str:
        """Return the newest messages as one line, or a hint that there are none."""
        lines = [line for line in list(self._lines) if line]
        return "; ".join(lines[-max_lines:]) or "llama.cpp gave no reason"
