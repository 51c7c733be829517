"""Stop strings: find the first one in a stream of text and say how much text must wait.

Used by :class:`enginehouse.engine.text.text_stream.TextStream`. Knows characters only, no tokens.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

__all__ = ["StopAutomaton", "stop_automaton"]


class StopAutomaton:
    """All stop strings of a request as one Aho-Corasick automaton; immutable, shared by its choices.

    A state is the longest suffix of the text so far that is a beginning of a stop string. Its length,
    ``depth[state]``, is therefore exactly how many characters must be held back: one less could show the
    first character of a stop string, one more would delay text that no stop string can claim. State 0 is
    the empty suffix. Every text costs time linear in its length, whatever the stop strings are.

    Source: A. Aho, M. Corasick, "Efficient string matching" (1975); the search ends at the first match.
    """

    __slots__ = ("_fail", "_first", "_goto", "_match", "depth")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not stops or not all(stops):
            raise ValueError("stop strings must not be empty")
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        self.depth = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = frozenset(self._goto[0])

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read ``text`` from ``state`` up to the end of the first stop string in it.

        The stop string that is complete first wins, since generation ends there; of several that end with
        the same character the longest, so that no beginning of another one is shown.

        Returns:
            The new state; how many characters were read; the stop string, or None after all of ``text``.
        """
        if not state and self._first.isdisjoint(text):
            return 0, len(text), None
        goto, fail, match = self._goto, self._fail, self._match
        for num_read, char in enumerate(text, 1):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if match[state] is not None:
                return state, num_read, match[state]
        return state, len(text), None

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._fail.append(0)
                self._match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Set each state's fail state, shortest states first, and hand down matches along them."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                fail = self._fail[state]
                while fail and char not in self._goto[fail]:
                    fail = self._fail[fail]
                self._fail[following] = self._goto[fail].get(char, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
                queue.append(following)


@lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of ``stops``; choices of one request, and requests alike, share it."""
    return StopAutomaton(stops)
