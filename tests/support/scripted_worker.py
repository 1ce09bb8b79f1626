"""A small real worker on a real socket: speaks the Worker protocol, and emits what the test tells it to.

Its model's tokens are bytes: token id n below 256 is the byte n. Its "model" goes on with `next_token`, a function of
the prompt and the position alone, so that any worker continues any request in the same way.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protos.inference.v1 import types_pb2, worker_pb2, worker_pb2_grpc

MODEL = "bytes"
SPECIALS = ("<|start|>", "<|end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
END_ID = 257
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
Script = Callable[[worker_pb2.Submit, int], int]
"""The token at an output position of a request."""


def next_token(submit: worker_pb2.Submit, position: int) -> int:
    """A lower-case letter that depends on prompt and position only."""
    return ord("a") + (sum(submit.prompt_token_ids) + 7 * position + position * position) % 26


def text_of(prompt_token_ids: Sequence[int], num_tokens: int) -> str:
    """What `next_token` makes of a prompt."""
    submit = worker_pb2.Submit(prompt_token_ids=prompt_token_ids)
    return "".join(chr(next_token(submit, position)) for position in range(num_tokens))


def spell(text: str) -> Script:
    """A script that says `text` again and again, byte by byte."""
    raw = text.encode()
    return lambda submit, position: raw[position % len(raw)]


@functools.cache
def tokenizer_json() -> bytes:
    """Byte-level BPE without merges, ids in the order of the bytes."""
    tokenizer = Tokenizer(models.BPE({_byte_symbol(byte): byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    raw = tokenizer.to_str().encode()
    assert json.loads(raw)["added_tokens"][1]["id"] == END_ID
    return raw


def _byte_symbol(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [it for it in range(256) if it not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))


@dataclass(eq=False)
class Running:
    """A submitted request."""

    submit: worker_pb2.Submit
    num_blocks: int
    num_emitted: int = 0  # of this attempt
    is_paused: bool = False

    @property
    def position(self) -> int:
        return len(self.submit.output_token_ids) + self.num_emitted


@dataclass(eq=False)
class Session:
    """One gateway's session."""

    gateway_id: str
    events: asyncio.Queue[worker_pb2.SessionEvent | None] = field(default_factory=asyncio.Queue)
    running: dict[str, Running] = field(default_factory=dict)
    accounted: list[worker_pb2.ClaimRef] = field(default_factory=list)
    num_messages: int = 0  # with commands


@dataclass
class ScriptedWorker:
    """Set the fields, `start`, and steer. With `step_s` it steps by itself, else the test calls `step`."""

    worker_id: str = "w1"
    epoch: int = 1
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 4096
    context_length: int = 4096
    model: str = MODEL
    script: Script = next_token
    step_s: float | None = 0.002
    tokens_per_step: int = 1
    alive_s: float = 0.2  # a session without news says so often that it lives
    reject: types_pb2.Reason.ValueType | None = None  # every submit
    fleet_key: str = ""

    def __post_init__(self) -> None:
        self.port = 0
        self.submitted: list[worker_pb2.Submit] = []
        self.aborted: list[str] = []
        self.pauses: list[bool] = []  # pause, resume
        self.drains: list[worker_pb2.Drain] = []
        self.sessions: list[Session] = []
        self.num_generated = 0  # tokens, of all sessions
        self.most_running = 0  # at once
        self.is_silent = False
        self.loop_age_s = 0.0
        self.is_draining = False
        self._seq = 0
        self._server: grpc.aio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def limits(self) -> worker_pb2.ModelLimits:
        return worker_pb2.ModelLimits(
            model=self.model,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
        )

    @property
    def running(self) -> list[Running]:
        return [it for session in self.sessions for it in session.running.values()]

    async def start(self) -> ScriptedWorker:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        if self.step_s is not None:
            self._stepper = asyncio.create_task(self._step_for_ever(self.step_s))
        return self

    async def __aenter__(self) -> ScriptedWorker:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Cuts every connection, without a goodbye."""
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
            self._stepper = None
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    def say_goodbye(self) -> None:
        """Ends every session on purpose."""
        for session in self.sessions:
            goodbye = worker_pb2.Goodbye(reason=types_pb2.REASON_DRAINING)
            session.events.put_nowait(worker_pb2.SessionEvent(goodbye=goodbye))
            session.events.put_nowait(None)
            session.running.clear()  # nothing of them would be sent any more

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Until a condition on this worker's state holds."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def step(self) -> None:
        """One token (or `tokens_per_step`) for every running request, in one event for each session."""
        for session in self.sessions:
            outputs = [
                self._advance(session, wire_id) for wire_id, it in list(session.running.items()) if not it.is_paused
            ]
            if outputs:
                self.send(session, outputs)
        await self.notify()

    def _advance(self, session: Session, wire_id: str) -> worker_pb2.RequestOutput:
        running = session.running[wire_id]
        submit = running.submit
        room = submit.sampling.max_tokens - running.position
        count = min(self.tokens_per_step, room)
        token_ids = [self.script(submit, running.position + index) for index in range(count)]
        ends = types_pb2.FINISH_REASON_LENGTH if count == room else types_pb2.FINISH_REASON_UNSPECIFIED
        stops = {END_ID, *submit.sampling.stop_token_ids}
        for index, token_id in enumerate(token_ids):
            if token_id in stops:
                token_ids = token_ids[: index + 1]
                ends = types_pb2.FINISH_REASON_STOP
                break
        output = worker_pb2.RequestOutput(
            request_id=wire_id, attempt=submit.attempt, token_ids=token_ids, finish_reason=ends
        )
        if submit.sampling.HasField("logprobs"):
            for token_id in token_ids:
                sampled = types_pb2.TokenLogprob(token_id=token_id, logprob=-0.5)
                output.logprobs.append(types_pb2.PositionLogprobs(sampled=sampled, top=[sampled]))
        running.num_emitted += len(token_ids)
        self.num_generated += len(token_ids)
        if ends:
            del session.running[wire_id]
        return output

    def send(self, session: Session, outputs: Sequence[worker_pb2.RequestOutput] = ()) -> None:
        step = worker_pb2.Step(outputs=outputs, usage=self._usage(session), loop_age_s=self.loop_age_s)
        session.events.put_nowait(worker_pb2.SessionEvent(step=step))

    def _usage(self, session: Session) -> worker_pb2.BlockUsage:
        self._seq += 1
        referenced = sum(it.num_blocks for it in self.running)
        accounted, session.accounted = session.accounted, []
        free_slots = 0 if self.is_draining else self.max_num_seqs - len(self.running)
        return worker_pb2.BlockUsage(
            seq=self._seq,
            empty=max(self.num_blocks - referenced, 0),
            referenced=referenced,
            running=len(self.running),
            free_slots=max(free_slots, 0),
            accounted=accounted,
        )

    async def take(self, session: Session, submit: worker_pb2.Submit) -> None:
        self.submitted.append(submit)
        session.accounted.append(worker_pb2.ClaimRef(request_id=submit.request_id, attempt=submit.attempt))
        reason = types_pb2.REASON_DRAINING if self.is_draining else self.reject
        if reason is not None:
            rejected = worker_pb2.Rejected(
                request_id=submit.request_id, attempt=submit.attempt, reason=reason, message="as told"
            )
            session.events.put_nowait(worker_pb2.SessionEvent(rejected=rejected))
        else:
            num_tokens = len(submit.prompt_token_ids) + submit.sampling.max_tokens
            session.running[submit.request_id] = Running(submit, min(-(-num_tokens // self.block_size), 8))
            self.most_running = max(self.most_running, len(self.running))
        self.send(session)
        await self.notify()

    async def stop_request(self, session: Session, abort: worker_pb2.Abort) -> None:
        self.aborted.append(abort.request_id)
        session.running.pop(abort.request_id, None)
        self.send(session)
        await self.notify()

    async def set_paused(self, session: Session, wire_id: str, is_paused: bool) -> None:
        if wire_id in session.running:
            session.running[wire_id].is_paused = is_paused
        self.pauses.append(is_paused)
        await self.notify()

    def hand_back(self, running: Running) -> None:
        """Lets a request go on elsewhere."""
        submit = running.submit
        for session in self.sessions:
            if session.running.get(submit.request_id) is running:
                del session.running[submit.request_id]
                handed_back = worker_pb2.HandedBack(request_id=submit.request_id, attempt=submit.attempt)
                session.events.put_nowait(worker_pb2.SessionEvent(handed_back=handed_back))
                self.send(session)

    async def _step_for_ever(self, step_s: float) -> None:
        while True:
            await asyncio.sleep(step_s)
            if not self.is_silent:
                await self.step()


class _Service(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Describe(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.DescribeResponse]:
        description = worker_pb2.Description(
            limits=self._worker.limits,
            tokenizer_json=tokenizer_json(),
            chat_template=TEMPLATE,
            eos_token_ids=[END_ID],
            bos_token=SPECIALS[0],
            eos_token=SPECIALS[1],
        ).SerializeToString()
        for start in range(0, len(description), 4096):
            yield worker_pb2.DescribeResponse(chunk=description[start : start + 4096])

    async def Session(self, commands: Any, context: Any) -> None:
        worker = self._worker
        if worker.fleet_key and ("authorization", f"Bearer {worker.fleet_key}") not in context.invocation_metadata():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "fleet key")
        first = await anext(commands)
        session = Session(first.open.gateway_id)
        worker.sessions.append(session)
        opened = worker_pb2.Opened(worker_id=worker.worker_id, epoch=worker.epoch, limits=worker.limits)
        await context.write(worker_pb2.SessionEvent(opened=opened))
        worker.send(session)
        reader = asyncio.create_task(self._read(session, commands))
        try:
            while (event := await self._next(session)) is not None:
                if not worker.is_silent:
                    await context.write(event)
        finally:
            reader.cancel()
            worker.sessions.remove(session)
            await worker.notify()

    async def _next(self, session: Session) -> worker_pb2.SessionEvent | None:
        try:
            async with asyncio.timeout(self._worker.alive_s):
                return await session.events.get()
        except TimeoutError:
            self._worker.send(session)
            return await session.events.get()

    async def _read(self, session: Session, commands: Any) -> None:
        async for command in _one_by_one(commands, session):
            if command.HasField("submit"):
                await self._worker.take(session, command.submit)
            elif command.HasField("abort"):
                await self._worker.stop_request(session, command.abort)
            elif command.HasField("pause"):
                await self._worker.set_paused(session, command.pause.request_id, True)
            elif command.HasField("resume"):
                await self._worker.set_paused(session, command.resume.request_id, False)
            elif command.HasField("drain"):
                self._worker.drains.append(command.drain)
                await self._worker.notify()
        session.events.put_nowait(None)


async def _one_by_one(commands: Any, session: Session) -> AsyncIterator[worker_pb2.SessionCommand]:
    async for first in commands:
        session.num_messages += 1
        for command in (first, *first.more):
            yield command


async def _serve_for_ever(worker: ScriptedWorker) -> None:
    await worker.start()
    print(worker.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":  # a process that can be stopped and killed: fields as JSON, `spell` for a script
    fields = json.loads(sys.argv[1])
    if "spell" in fields:
        fields["script"] = spell(fields.pop("spell"))
    asyncio.run(_serve_for_ever(ScriptedWorker(**fields)))
