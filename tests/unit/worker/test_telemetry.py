"""What a step's numbers become in the metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from common.metrics import WorkerMetrics
from tests.unit.worker.engine.rig import SESSION, EngineRig
from worker.telemetry import observe_step


def test_slots_in_blocks_that_hold_a_token_are_shown_and_promised_blocks() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    rig = EngineRig(max_chunk=6, block_size=4)
    rig.submit("r", [1] * 16, 2)
    observe_step(metrics, rig.engine.step(), 0.01)
    assert registry.get_sample_value("tidegate_worker_kv_utilization") == 6 / 8
    assert registry.get_sample_value("tidegate_worker_promised_blocks") == 2
    rig.run()
    observe_step(metrics, rig.engine.step(), 0.01)
    assert registry.get_sample_value("tidegate_worker_kv_utilization") == 0
    assert registry.get_sample_value("tidegate_worker_promised_blocks") == 0


def test_levels_waits_and_preemptions_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    rig = EngineRig(max_num_seqs=1, long_after_steps=4, max_chunk=4, grace_steps=0, prefix_cache=False)
    rig.submit("long", [1] * 6, 20)
    for step in range(40):
        if step == 8:
            rig.submit("new", [2] * 2, 3)
            rig.now_s += 1.0
        observe_step(metrics, rig.engine.step(), 0.01)

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(f"tidegate_worker_{name}", labels)
        assert found is not None
        return found

    assert value("step_rows_total", kind="first_chunk") == 2
    assert value("step_rows_total", kind="further_chunk") > 1, "the prompt's second chunk, and those of the return"
    assert value("step_rows_total", kind="decode") + value("step_rows_total", kind="long_decode") == 21, (
        "not those at a chunk's end"
    )
    assert value("step_rows_total", kind="long_decode") > 0
    assert value("preemptions_total") == value("yielded_total") == 1
    assert value("first_chunk_wait_seconds_count") == 2
    assert value("first_chunk_wait_seconds_sum") == 1.0
    assert value("recomputed_tokens_total") > 6
    assert value("thrash_ratio") > 0
    assert value("output_tokens_total") == 23


def test_requests_of_a_session_that_ends_are_counted_and_hold_nothing() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    rig = EngineRig(max_num_seqs=2)
    for name in ("cancelled", "running", "waiting", "late"):
        rig.submit(name, [1] * 4, 20)
    observe_step(metrics, rig.engine.step(), 0.01)
    rig.abort("cancelled")
    observe_step(metrics, rig.engine.step(), 0.01)
    rig.engine.abort_session(SESSION)
    observe_step(metrics, rig.engine.step(), 0.01)
    observe_step(metrics, rig.engine.step(), 0.01)
    assert registry.get_sample_value("tidegate_worker_finished_total", {"reason": "CANCELLED"}) == 1
    assert registry.get_sample_value("tidegate_worker_abandoned_total") == 3
    assert registry.get_sample_value("tidegate_worker_running") == 0
    assert registry.get_sample_value("tidegate_worker_waiting") == 0
    assert registry.get_sample_value("tidegate_worker_blocks", {"state": "referenced"}) == 0
