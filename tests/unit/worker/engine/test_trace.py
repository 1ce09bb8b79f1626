"""The step trace: a file that viewers read, with batch, chunks, levels, blocks and preemptions in it."""

from __future__ import annotations

import io
import json
from typing import Any

from tests.unit.worker.engine.rig import EngineRig
from worker.engine.trace import FLUSH_EVENTS, ChromeTrace


class KeptFile(io.StringIO):
    """A file whose content can be read after it was closed."""

    content = ""

    def close(self) -> None:
        self.content = self.getvalue()
        super().close()


def traced_rig(**options: Any) -> tuple[EngineRig, ChromeTrace, KeptFile]:
    out = KeptFile()
    trace = ChromeTrace(out)
    rig = EngineRig(tracer=trace, **options)
    rig.cost_s = lambda batch: 0.001 * batch.num_tokens
    return rig, trace, out


def test_a_run_can_be_looked_at() -> None:
    rig, trace, out = traced_rig(num_blocks=9, max_num_seqs=3, long_after_steps=4)
    for index in range(3):
        rig.submit(f"r{index}", [index] * 8, 12)
    rig.run()
    num_steps = sum(stats.num_rows > 0 for stats in rig.stats)
    trace.close()
    events = json.loads(out.content)
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"].startswith("step") for event in slices) == num_steps
    assert all(event["dur"] > 0 for event in slices if event["name"] == "execute")
    rows = [event for event in slices if "request" in event["args"]]
    assert len(rows) == sum(stats.num_rows for stats in rig.stats)
    assert {row["name"] for row in rows[:3]} == {"chunk 8"}
    assert {row["args"]["level"] for row in rows if row["name"] == "decode"} == {2, 3}
    preemptions = [event for event in events if event["name"] == "preempt"]
    assert len(preemptions) == sum(stats.num_preemptions for stats in rig.stats) > 0
    blocks = [event["args"] for event in events if event["name"] == "blocks"]
    assert all(sum(each.values()) == 9 for each in blocks)
    times = [event["ts"] for event in slices if event["name"].startswith("step")]
    assert times == sorted(times)


def test_it_is_readable_before_it_is_closed_but_for_the_last_piece() -> None:
    rig, _, out = traced_rig(num_blocks=200)
    rig.submit("r", [1, 2, 3], 500)
    while not out.tell() > 2:
        rig.step()
    events = json.loads(out.getvalue().rstrip().rstrip(",") + "]")
    assert len(events) >= FLUSH_EVENTS


def test_steps_without_a_batch_leave_no_trace() -> None:
    rig, trace, out = traced_rig()
    rig.step()
    trace.close()
    assert [event["ph"] for event in json.loads(out.content)] == ["M", "M"]
