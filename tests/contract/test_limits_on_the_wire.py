"""What a worker tells of its limits is what a gateway understands."""

from __future__ import annotations

import pytest

from common.types import ModelLimits
from common.window import Window, Windows
from gateway.rpc.worker_codec import decode_limits
from worker.rpc.codec import limits_to_proto


@pytest.mark.parametrize("windows", [(None,), (Window(512),), (Window(64, 4),), (None, Window(512), Window(512))])
def test_limits_arrive_as_they_were_sent(windows: Windows) -> None:
    limits = ModelLimits("m", 8192, 49152, 16, 1000, 64, windows, 512)
    assert decode_limits(limits_to_proto(limits)) == limits
