"""A request from the client's wire to a worker and back."""

from __future__ import annotations

from protos.inference.v1 import types_pb2
from tests.integration.gateway.rig import Rig
from tests.support.scripted_worker import MODEL, text_of


async def test_a_stream_flows_end_to_end(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    answer = await client.ask("hello", sampling={"max_tokens": 12, "seed": 5})
    assert answer.error is None
    assert answer.accepted is not None
    assert answer.finished is not None
    assert (answer.accepted.model, answer.accepted.prompt_tokens, answer.accepted.seed) == (MODEL, 5, 5)
    assert answer.text == text_of(b"hello", 12)
    assert answer.finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.finished.usage == types_pb2.Usage(prompt_tokens=5, completion_tokens=12)
