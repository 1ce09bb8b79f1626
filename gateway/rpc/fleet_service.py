"""What workers call on gateways."""

from __future__ import annotations

import re
from typing import Any

from common.errors import InvalidRequestError
from gateway.queueing.queue import Queue, WorkerRecord
from protos.inference.v1 import fleet_pb2, fleet_pb2_grpc

SERVICE_NAME = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name
register = fleet_pb2_grpc.add_FleetServicer_to_server

_WORKER_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ADDRESS = re.compile(r"\S{1,255}:\d{1,5}")


class FleetService(fleet_pb2_grpc.FleetServicer):
    """Writes announcements into the store, where every gateway finds them."""

    def __init__(self, queue: Queue, *, ttl_s: float) -> None:
        self._queue = queue
        self._ttl_s = ttl_s

    async def Announce(self, request: fleet_pb2.AnnounceRequest, context: Any) -> fleet_pb2.AnnounceResponse:
        """Makes a worker known to all gateways for a while."""
        if not _WORKER_ID.fullmatch(request.worker_id):
            raise InvalidRequestError.of_field("worker_id", f"must match {_WORKER_ID.pattern}")
        if not _ADDRESS.fullmatch(request.address):
            raise InvalidRequestError.of_field("address", "must be host:port")
        if not request.model:
            raise InvalidRequestError.of_field("model", "is empty; the served model's name is needed")
        record = WorkerRecord(request.worker_id, request.epoch, request.address, request.model, request.draining)
        await self._queue.announce(record, ttl_s=self._ttl_s)
        return fleet_pb2.AnnounceResponse(ttl_s=self._ttl_s)
