"""Why a request waits, where it runs, or why it was refused."""

from __future__ import annotations

from common.clock import Clock
from common.errors import UnavailableError
from common.types import BlockUsage, ModelLimits
from gateway.dispatcher import Dispatcher
from gateway.lifecycle import RequestState
from gateway.live import LiveRequest
from gateway.placement.worker import WorkerState
from gateway.queueing.queue import Position, Queue
from gateway.rpc.dialer import WorkerDialer
from gateway.rpc.endings import Ending, Endings
from gateway.rpc.shared_endings import SharedEndings
from gateway.rpc.worker_session import GrpcWorkerSession
from protos.inference.v1 import admin_pb2, types_pb2

_WAITS_FOR_STORE = "it is accepted, and waits for the queue's store, which does not answer"
_JUST_CLAIMED = "it has just left the queue, or is on its way back to it"
_UNKNOWN = "no gateway holds it: it ended well, or long ago, or within the last second elsewhere, or never came"


class Explainer:
    """Looks at what this gateway, its workers' last reports and the queue know."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        dialer: WorkerDialer,
        queue: Queue,
        endings: Endings,
        shared: SharedEndings,
        clock: Clock,
        gateway_id: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._dialer = dialer
        self._queue = queue
        self._endings = endings
        self._shared = shared
        self._clock = clock
        self._gateway_id = gateway_id

    async def explain(self, fleet_id: str) -> admin_pb2.ExplainRequestResponse:
        """What is known of a request here, or which gateway knows more."""
        live = self._dispatcher.find(fleet_id)
        if live is not None and not live.lifecycle.is_ended:
            return await self._of_live(live)
        owner = await self._queue.owner_of(fleet_id)
        if owner is not None and owner != self._gateway_id:
            text = f"gateway {owner} holds the client's stream; ask it"
            return admin_pb2.ExplainRequestResponse(state="elsewhere", explanation=text, gateway_id=owner)
        known = await self._shared.find(fleet_id)
        if known is not None:
            return self._of_ending(known.ending, known.gateway_id)
        return admin_pb2.ExplainRequestResponse(state="unknown", explanation=_UNKNOWN)

    def refusals(self, tenant_id: str, most: int) -> list[admin_pb2.Refusal]:
        """The last requests of a tenant that ended with an error here, latest first."""
        now = self._clock.monotonic()
        return [
            admin_pb2.Refusal(
                request_id=ending.request_id,
                status=ending.status,
                reason=types_pb2.Reason.ValueType(ending.reason.value),
                message=ending.message,
                age_s=now - ending.at,
                may_come_back=ending.retry_after_s is not None,
            )
            for ending in self._endings.latest(tenant_id, most)
        ]

    def _of_ending(self, ending: Ending, gateway_id: str) -> admin_pb2.ExplainRequestResponse:
        again = (
            ""
            if ending.retry_after_s is None
            else f"; the client was told to come back in {ending.retry_after_s:.1f} s"
        )
        return admin_pb2.ExplainRequestResponse(
            state="refused",
            explanation=f"{ending.status}/{ending.reason.name}: {ending.message}{again}",
            gateway_id=gateway_id,
            age_s=self._clock.monotonic() - ending.at,
            reason=types_pb2.Reason.ValueType(ending.reason.value),
        )

    async def _of_live(self, live: LiveRequest) -> admin_pb2.ExplainRequestResponse:
        request, now, claim = live.request, self._clock.monotonic(), live.claim
        is_waiting = live.lifecycle.state is RequestState.QUEUED
        entry = self._dispatcher.entry_of(live)
        answer = admin_pb2.ExplainRequestResponse(
            state=live.lifecycle.state.value,
            gateway_id=self._gateway_id,
            band=types_pb2.Band.ValueType(request.band),
            model=request.model.limits.model,
            age_s=now - live.arrived,
            waited_s=now - live.queued_at if is_waiting else (live.taken_at or now) - live.accepted_at,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(live.output_token_ids),
            tokens_needed=entry.num_tokens_needed,
            worker_id=claim.worker_id if claim is not None else "",
            attempt=claim.attempt if claim is not None else 0,
            num_losses=live.num_losses,
        )
        if not is_waiting:
            answer.explanation = f"worker {answer.worker_id} has it" if claim is not None else "it is about to end"
            return answer
        answer.num_earlier_here = sum(
            other.lifecycle.state is RequestState.QUEUED
            and other.request.band is request.band
            and other.queued_at < live.queued_at
            for other in self._dispatcher.live
        )
        try:
            depths = await self._queue.depths()
            position = await self._queue.position(live.fleet_id)
        except UnavailableError:
            answer.waits_for, answer.explanation = "store", _WAITS_FOR_STORE
            return answer
        answer.num_waiting_in_band = sum(depth.num_waiting for depth in depths if depth.band is request.band)
        if position is None:
            answer.waits_for, answer.explanation = (
                ("turn", _JUST_CLAIMED) if live.is_enqueued else ("store", _WAITS_FOR_STORE)
            )
            return answer
        answer.num_ahead_in_flow = position.num_ahead_in_flow
        answer.num_flows_first = position.num_flows_first
        answer.num_waiting_above = position.num_waiting_above
        answer.num_overtaken = position.num_overtaken
        sessions = [it for it in self._dialer.sessions.values() if it.limits.model == answer.model and it.worker_id]
        rooms = [_room(session, answer.tokens_needed) for session in sessions]
        answer.workers.extend(sorted(rooms, key=lambda room: room.worker_id))
        answer.waits_for, what = _waiting_for(rooms, answer.model)
        answer.explanation = f"{what}; {_place(position)}"
        return answer


def _room(session: GrpcWorkerSession, num_tokens_needed: int) -> admin_pb2.WorkerRoom:
    limits, usage = session.limits, session.usage
    needed = min(-(-num_tokens_needed // limits.block_size), limits.num_blocks)
    return admin_pb2.WorkerRoom(
        worker_id=session.worker_id,
        free_slots=usage.free_slots if usage is not None else 0,
        free_blocks=usage.free_blocks if usage is not None else 0,
        blocks_needed=needed,
        obstacle=_obstacle(session.state, limits, usage, needed),
    )


def _obstacle(state: WorkerState, limits: ModelLimits, usage: BlockUsage | None, needed: int) -> str:
    if state is not WorkerState.READY:
        return str(state.value)
    if usage is None:
        return "has told no numbers yet"
    if usage.free_slots <= 0:
        return f"no slot is free: {limits.max_num_seqs} requests at most"
    if usage.free_blocks < needed:
        return f"needs {needed} blocks, {usage.free_blocks} are free"
    return ""


def _waiting_for(rooms: list[admin_pb2.WorkerRoom], model: str) -> tuple[str, str]:
    if not rooms:
        return "worker", f"it waits for a worker: this gateway has no session with one that serves {model}"
    if all(room.obstacle for room in rooms):
        obstacles = "; ".join(f"{room.worker_id}: {room.obstacle}" for room in rooms)
        return "room", f"it waits for room: {obstacles}"
    names = ", ".join(room.worker_id for room in rooms if not room.obstacle)
    return "turn", f"it waits for its turn: by the last reports {names} has room, which those ahead may be given first"


def _place(position: Position) -> str:
    return (
        f"ahead of it are {position.num_ahead_in_flow} requests of its tenant, the turns of {position.num_flows_first} "
        f"tenants of its band that have been served less, and {position.num_waiting_above} requests of higher bands; "
        f"it was overtaken {position.num_overtaken} times"
    )
