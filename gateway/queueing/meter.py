"""Counts the output tokens of flows between two charges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gateway.queueing.queue import Flow


class OutputMeter:
    """What flows got since the queue was told last. On one event loop."""

    def __init__(self) -> None:
        self._tokens: defaultdict[Flow, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"OutputMeter({sum(self._tokens.values())} tokens of {len(self._tokens)} flows)"

    def add(self, flow: Flow, num_tokens: int) -> None:
        """Tokens were made for a flow."""
        if num_tokens:
            self._tokens[flow] += num_tokens

    def take(self) -> Mapping[Flow, int]:
        """Everything counted since the last time; it is then the caller's to charge."""
        taken, self._tokens = self._tokens, defaultdict(int)
        return taken

    def give_back(self, tokens: Mapping[Flow, int]) -> None:
        """What could not be charged."""
        for flow, num_tokens in tokens.items():
            self._tokens[flow] += num_tokens
