"""A worker without a model: its tokens come by a schedule, and each says when it was sent.

`python -m bench.null_worker --listen 127.0.0.1:7000` serves the real worker protocol. A request's first token comes at
once, the others at `--rate` tokens a second. Requests are spread over batches of `--batch`, whose steps are evenly
staggered, as those of several engines would be. A token's text is its send time: four hexadecimal digits, in tenths of
a millisecond of the machine's monotonic clock, so a reader on the same machine knows how long it was on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from common import event_loop
from common.clock import SystemClock
from common.rpc.server import RpcServer, ServerOptions
from common.types import Band, BlockUsage, ClaimRef, FinishReason, ModelDescription, ModelLimits, SamplingParams
from worker.engine.events import RequestOutput, SessionOutput, StepOutput
from worker.rpc.fleet_key import FleetKey
from worker.rpc.identity import Identity
from worker.rpc.service import SERVICE_NAME, Serving, WorkerService, register

MODEL = "null"
STAMPS_PER_S = 10_000
NUM_STAMPS = 1 << 16
STAMP_CHARS = 4
_NUM_BYTES = 256
_BLOCK_SIZE = 16
_MAX_MESSAGE_BYTES = 16 << 20


def stamp(now: float) -> int:
    """A moment (monotonic seconds) in tenths of a millisecond, modulo 65536."""
    return int(now * STAMPS_PER_S) % NUM_STAMPS


def seconds_since(sent: int, now: float) -> float:
    """Seconds from a stamp to a moment less than 6 s later."""
    return (now * STAMPS_PER_S - sent) % NUM_STAMPS / STAMPS_PER_S


def tokenizer_json() -> bytes:
    """Byte-level BPE without merges: the 256 bytes, then a token of four hexadecimal digits for every stamp."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    vocabulary |= {f"{number:04x}": _NUM_BYTES + number for number in range(NUM_STAMPS)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(tokenizer).encode()


@dataclass(slots=True)
class _Running:
    """A request; `left` tokens are still to come."""

    request_id: str
    attempt: int
    left: int
    is_paused: bool = False


class _Session:
    """A gateway's requests by batch, and what it has not been told yet."""

    def __init__(self, num_batches: int) -> None:
        self.batches: list[dict[tuple[str, int], _Running]] = [{} for _ in range(num_batches)]
        self.fresh: list[tuple[_Running, int]] = []  # with the batch that takes it
        self.accounted: list[ClaimRef] = []


class NullEngine:
    """The engine's side of the worker service (`EngineLoop`), on the event loop itself."""

    def __init__(self, description: ModelDescription, rate: float, num_batches: int) -> None:
        self.service: WorkerService | None = None  # which is told of every step
        self._limits = description.limits
        self._rate = rate
        self._num_batches = num_batches
        self._sessions: dict[int, _Session] = {}
        self._loads = [0] * num_batches
        self._num_running = 0
        self._seq = 0
        self._is_flush_due = False

    @property
    def age_s(self) -> float:
        """It never hangs."""
        return 0.0

    def open_session(self, session_id: int) -> None:
        """Tells the session the block usage at once."""
        self._sessions[session_id] = _Session(self._num_batches)
        self._tell(session_id, [])

    def submit(
        self,
        session_id: int,
        request_id: str,
        attempt: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_token_ids: Sequence[int],
        band: Band,
        cache_salt: str,
        timeout_s: float | None,
        may_hand_back: bool,
    ) -> None:
        """Gives the first token at once, with those of others that came in the same turn of the loop."""
        session = self._sessions[session_id]
        batch = min(range(self._num_batches), key=self._loads.__getitem__)
        self._loads[batch] += 1
        self._num_running += 1
        session.fresh.append((_Running(request_id, attempt, sampling.max_tokens - len(output_token_ids)), batch))
        session.accounted.append(ClaimRef(request_id, attempt))
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def abort(self, session_id: int, request_id: str, attempt: int) -> None:
        """Forgets a request; the room that it leaves is told with the next step."""
        session = self._sessions[session_id]
        self._flush()
        for number, batch in enumerate(session.batches):
            if batch.pop((request_id, attempt), None) is not None:
                self._stop(number)
        self._tell(session_id, [])

    def set_paused(self, session_id: int, request_id: str, attempt: int, is_paused: bool) -> None:
        """Leaves a request out of the steps, or takes it in again."""
        self._flush()
        for batch in self._sessions[session_id].batches:
            if (request_id, attempt) in batch:
                batch[request_id, attempt].is_paused = is_paused

    def abort_session(self, session_id: int) -> None:
        """Forgets a session with all its requests."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for number, batch in enumerate(session.batches):
            self._loads[number] -= len(batch)
            self._num_running -= len(batch)
        for _, number in session.fresh:
            self._stop(number)

    async def run(self) -> None:
        """Steps every batch `rate` times a second, by the clock: a late step does not delay the next ones."""
        interval_s = 1 / (self._rate * self._num_batches)
        number, due = 0, time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._step(number)
            number = (number + 1) % self._num_batches
            due = max(due + interval_s, time.monotonic() - 1.0)

    def _step(self, number: int) -> None:
        for session_id, session in self._sessions.items():
            running = [each for each in session.batches[number].values() if not each.is_paused]
            if running:
                outputs = [self._next(session, each, number) for each in running]
                self._tell(session_id, outputs)

    def _flush(self) -> None:
        self._is_flush_due = False
        for session_id, session in self._sessions.items():
            fresh, session.fresh = session.fresh, []
            if fresh:
                for running, number in fresh:
                    session.batches[number][running.request_id, running.attempt] = running
                self._tell(session_id, [self._next(session, running, number) for running, number in fresh])

    def _next(self, session: _Session, running: _Running, number: int) -> RequestOutput:
        running.left -= 1
        is_last = running.left <= 0
        if is_last:
            del session.batches[number][running.request_id, running.attempt]
            self._stop(number)
        token_ids = (_NUM_BYTES + stamp(time.monotonic()),)
        reason = FinishReason.LENGTH if is_last else None
        return RequestOutput(running.request_id, running.attempt, token_ids, (), reason, 0)

    def _stop(self, number: int) -> None:
        self._loads[number] -= 1
        self._num_running -= 1

    def _tell(self, session_id: int, outputs: list[RequestOutput]) -> None:
        assert self.service is not None
        session = self._sessions[session_id]
        self._seq += 1
        usage = BlockUsage(
            seq=self._seq,
            empty=self._limits.num_blocks - self._num_running,
            cached=0,
            referenced=self._num_running,
            swapping=0,
            running=self._num_running,
            waiting=0,
            free_slots=self._limits.max_num_seqs - self._num_running,
            accounted=tuple(session.accounted),
        )
        session.accounted.clear()
        news = SimpleNamespace(sessions={session_id: SessionOutput(outputs, [], usage)})  # a step's other numbers: none
        self.service.on_step(cast(StepOutput, news))


def describe(max_num_seqs: int) -> ModelDescription:
    """A model of bytes and stamps, with room for everything."""
    limits = ModelLimits(MODEL, 1 << 20, _NUM_BYTES + NUM_STAMPS, _BLOCK_SIZE, 1 << 24, max_num_seqs)
    return ModelDescription(limits, tokenizer_json(), "", (), None, False, "", "")


async def serve(listen: str, rate: float, batch: int, max_num_seqs: int) -> None:
    """Serves until cancelled."""
    description = describe(max_num_seqs)
    engine = NullEngine(description, rate, max(1, round(max_num_seqs / batch)))
    service = WorkerService(Identity("null", int(time.time() * 1000)), FleetKey(""))
    engine.service = service
    server = RpcServer(ServerOptions(_MAX_MESSAGE_BYTES, _MAX_MESSAGE_BYTES), SystemClock())
    server.add(SERVICE_NAME, register, service)
    await server.start(listen)
    service.serve(Serving(engine, description))
    await server.set_serving(["", SERVICE_NAME], is_serving=True)
    await engine.run()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A worker without a model, for measuring gateways.")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each request")
    parser.add_argument("--batch", type=int, default=64, help="requests that step together")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="requests at most")
    arguments = parser.parse_args()
    event_loop.run(serve(arguments.listen, arguments.rate, arguments.batch, arguments.max_num_seqs))


if __name__ == "__main__":
    main()
