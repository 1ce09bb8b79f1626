"""Workers without a model: their tokens come by a schedule, and each says when it was sent.

`python -m bench.null_worker 127.0.0.1:7000 127.0.0.1:7001` serves the real worker protocol at each address, as a worker
of its own. A request's first token comes at once, the others at `--rate` tokens a second. All requests of a worker step
together, the workers one after the other. A token's text is its send time: four hexadecimal digits, in tenths of
a millisecond of the machine's monotonic clock, so a reader on the same machine knows how long it was on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
    """A gateway's requests, and what it has not been told yet."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, int], _Running] = {}
        self.fresh: list[_Running] = []
        self.accounted: list[ClaimRef] = []


class NullEngine:
    """The engine's side of the worker service (`EngineLoop`), on the event loop itself."""

    def __init__(self, description: ModelDescription) -> None:
        self.service: WorkerService | None = None  # which is told of every step
        self._limits = description.limits
        self._sessions: dict[int, _Session] = {}
        self._seq = 0
        self._is_flush_due = False

    @property
    def age_s(self) -> float:
        """It never hangs."""
        return 0.0

    @property
    def _num_running(self) -> int:
        return sum(len(session.running) + len(session.fresh) for session in self._sessions.values())

    def open_session(self, session_id: int) -> None:
        """Tells the session the block usage at once."""
        self._sessions[session_id] = _Session()
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
        session.fresh.append(_Running(request_id, attempt, sampling.max_tokens - len(output_token_ids)))
        session.accounted.append(ClaimRef(request_id, attempt))
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def abort(self, session_id: int, request_id: str, attempt: int) -> None:
        """Forgets a request; the room that it leaves is told with the next step."""
        self._flush()
        self._sessions[session_id].running.pop((request_id, attempt), None)
        self._tell(session_id, [])

    def set_paused(self, session_id: int, request_id: str, attempt: int, is_paused: bool) -> None:
        """Leaves a request out of the steps, or takes it in again."""
        self._flush()
        running = self._sessions[session_id].running.get((request_id, attempt))
        if running is not None:
            running.is_paused = is_paused

    def abort_session(self, session_id: int) -> None:
        """Forgets a session with all its requests."""
        self._sessions.pop(session_id, None)

    def step(self) -> None:
        """Makes a token for every request that runs."""
        for session_id, session in self._sessions.items():
            running = [each for each in session.running.values() if not each.is_paused]
            if running:
                self._tell(session_id, [self._next(session, each) for each in running])

    def _flush(self) -> None:
        self._is_flush_due = False
        for session_id, session in self._sessions.items():
            fresh, session.fresh = session.fresh, []
            if fresh:
                session.running.update({(each.request_id, each.attempt): each for each in fresh})
                self._tell(session_id, [self._next(session, each) for each in fresh])

    def _next(self, session: _Session, running: _Running) -> RequestOutput:
        running.left -= 1
        is_last = running.left <= 0
        if is_last:
            del session.running[running.request_id, running.attempt]
        token_ids = (_NUM_BYTES + stamp(time.monotonic()),)
        reason = FinishReason.LENGTH if is_last else None
        return RequestOutput(running.request_id, running.attempt, token_ids, (), reason, 0)

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


async def step_all(engines: Sequence[NullEngine], rate: float) -> None:
    """Steps every engine `rate` times a second, one after the other at equal distances, by the clock: a late step does
    not delay the next ones."""
    due = time.monotonic()
    for engine in itertools.cycle(engines):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        engine.step()
        due = max(due + 1 / (rate * len(engines)), time.monotonic() - 1.0)


def describe(max_num_seqs: int) -> ModelDescription:
    """A model of bytes and stamps, with room for everything."""
    limits = ModelLimits(MODEL, 1 << 20, _NUM_BYTES + NUM_STAMPS, _BLOCK_SIZE, 1 << 24, max_num_seqs)
    return ModelDescription(limits, tokenizer_json(), "", (), None, False, "", "")


async def start(listen: str, description: ModelDescription) -> tuple[NullEngine, RpcServer]:
    """Serves a worker at an address, for as long as somebody keeps the server."""
    engine = NullEngine(description)
    service = WorkerService(Identity(f"null-{listen}", int(time.time() * 1000)), FleetKey(""))
    engine.service = service
    server = RpcServer(ServerOptions(_MAX_MESSAGE_BYTES, _MAX_MESSAGE_BYTES), SystemClock())
    server.add(SERVICE_NAME, register, service)
    await server.start(listen)
    service.serve(Serving(engine, description))
    await server.set_serving(["", SERVICE_NAME], is_serving=True)
    return engine, server


async def serve(addresses: Sequence[str], rate: float, max_num_seqs: int) -> None:
    """Serves until cancelled."""
    description = describe(max_num_seqs)
    started = [await start(address, description) for address in addresses]
    await step_all([engine for engine, _ in started], rate)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Workers without a model, for measuring gateways.")
    parser.add_argument(
        "addresses", nargs="*", default=["127.0.0.1:0"], metavar="host:port", help="one for each worker"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each request")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests of one worker at most")
    arguments = parser.parse_args()
    event_loop.run(serve(arguments.addresses, arguments.rate, arguments.max_num_seqs))


if __name__ == "__main__":
    main()
