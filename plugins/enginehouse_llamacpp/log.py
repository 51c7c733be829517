"""Keeps what llama.cpp logs, so that an error can say why. Knows nothing of the library itself."""

from __future__ import annotations

from collections import deque

__all__ = ["LogBuffer"]

_WARNING, _ERROR, _CONTINUED = 3, 4, 5


class LogBuffer:
    """The newest warnings and errors of llama.cpp; any thread may write."""

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
        """Forget what was logged, before an operation whose errors matter."""
        self._lines.clear()

    def reason(self, max_lines: int = 4) -> str:
        """The newest lines as one, or a hint that there were none."""
        lines = [line for line in list(self._lines) if line]
        return "; ".join(lines[-max_lines:]) or "llama.cpp gave no reason"
