"""The way of an answer's text into its call's stream."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import TidegateError
from common.rpc.stream_writer import StreamWriter
from gateway.answer import TextDelta
from gateway.rpc.codec import TokenBytes, encode_event


class StreamOutlet:
    """An `Outlet`. Shares its writer with the call's task, which writes what is no text."""

    def __init__(self, writer: StreamWriter, too_slow: TidegateError) -> None:
        """`too_slow`: what a client is told that does not read."""
        self._writer = writer
        self.token_bytes: TokenBytes = _no_bytes  # of the model that answers, before the first text
        self.on_stuck: Callable[[TidegateError], None] = lambda error: None
        writer.on_stuck = lambda: self.on_stuck(too_slow)

    @property
    def is_free(self) -> bool:
        """Whether all that was sent so far is on its way."""
        return self._writer.is_free

    def send(self, delta: TextDelta) -> None:
        """Sends text while it is free."""
        self._writer.begin(encode_event(delta, self.token_bytes))


def _no_bytes(token_id: int) -> bytes:
    raise LookupError(f"token {token_id} of a model that nobody has named")
