"""Find stop strings in text that arrives in pieces, and hold back no more than a match could still need."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.errors import InvalidRequestError


class StopMatcher:
    """An Aho-Corasick automaton over a request's stop strings, fed with text as it is decoded.

    The text ends at the first stop string that becomes complete; of several that end with the same character, at the
    longest. This depends on the characters alone, never on how the text was split. What is held back is the longest
    tail that is a proper prefix of a stop string: the automaton's state.
    Building costs the total length of the stop strings, feeding costs the length of the new text.
    """

    __slots__ = ("_depth", "_fail", "_goto", "_held", "_longest", "_state", "matched")

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: at least one string. Raises InvalidRequestError if one is empty."""
        if not all(stop):
            raise InvalidRequestError.of_field(
                "sampling.stop", "a stop string is empty; at least 1 character is needed"
            )
        self._goto: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._longest: list[int] = [0]  # per state: length of the longest stop string that ends here, 0 if none does
        self._fail: list[int] = [0]  # per state: the state of its longest proper suffix that is a prefix
        for text in stop:
            self._insert(text)
        self._link()
        self._state = 0
        self._held = ""
        self.matched = False

    def _insert(self, text: str) -> None:
        state = 0
        for depth, char in enumerate(text, start=1):
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(depth)
                self._longest.append(0)
                self._fail.append(0)
            state = following
        self._longest[state] = len(text)

    def _link(self) -> None:
        """Set the failure links in breadth-first order: a link leads to a state that is nearer to the root."""
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._goto[state].items():
                queue.append(child)
                fallback = self._fail[state]
                while fallback and char not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._goto[fallback].get(char, 0)
                self._longest[child] = self._longest[child] or self._longest[self._fail[child]]

    def feed(self, text: str) -> str:
        """Take more text and return what can no longer be part of a stop string.

        When a stop string becomes complete, `matched` turns true, the text before it is returned and the rest dropped.
        """
        if self.matched:
            return ""
        goto, fail, longest = self._goto, self._fail, self._longest
        root = goto[0]
        state = self._state
        for position, char in enumerate(text, start=1):
            if state:
                following = goto[state].get(char)
                while following is None and state:
                    state = fail[state]
                    following = goto[state].get(char)
                state = following or 0
            elif char in root:
                state = root[char]
            else:
                continue
            if longest[state]:
                self.matched = True
                seen = self._held + text[:position]
                self._held = ""
                return seen[: len(seen) - longest[state]]
        self._state = state
        if not state and not self._held:
            return text
        seen = self._held + text
        released = len(seen) - self._depth[state]
        self._held = seen[released:]
        return seen[:released]

    def flush(self) -> str:
        """The text ends here: return what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
