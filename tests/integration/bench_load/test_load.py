"""A whole measurement against a gateway on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.load.arrivals import Process
from bench.load.goodput import CapacitySearch, GoodputRule
from bench.load.plan import Point
from bench.load.session import Options, measure
from bench.load.tenants import Sender
from bench.traces import load_trace
from common.clock import SystemClock
from tests.integration.bench_load.gateway import LOST, REFUSED, StandInGateway, serving

Make = Callable[..., Options]


@pytest.fixture
def options(tmp_path: Path) -> Make:
    def make(address: str, **changes: Any) -> Options:
        senders = (Sender("acme", "key-a", share=1), Sender("bulk", "key-b", share=1))
        made = Options("mixed", (Point(rate=200.0),), tmp_path / "out", address, senders)
        made = replace(made, num_requests=12, num_warmups=0, scale=0.02, has_pictures=False)
        return replace(made, **changes)

    return make


async def run(options: Options) -> tuple[bool, list[dict[str, Any]]]:
    is_whole = await measure(options, Console(quiet=True), SystemClock())
    paths = sorted(options.output.glob("[0-9]*.json"))
    return is_whole, [json.loads(path.read_text()) for path in paths]


async def test_what_is_sent_and_what_is_written(options: Make) -> None:
    gateway = StandInGateway()
    async with serving(gateway) as address:
        is_whole, (document,) = await run(options(address, is_detailed=True, num_warmups=2))
    assert is_whole
    assert document["is_whole"]
    assert (document["completed"], document["failed"], document["num_prompts"]) == (12, 0, 12)
    assert len(gateway.requests) == 14
    measured = gateway.requests[2:]
    assert sorted(document["input_lens"]) == sorted(len(each.tokens.token_ids) for each in measured)
    assert sum(document["output_lens"]) == sum(each.sampling.max_tokens for each in measured)
    assert all(each.sampling.ignore_eos and each.return_token_ids for each in measured)
    assert set(gateway.keys) == {"Bearer key-a", "Bearer key-b"}
    assert document["total_cached_tokens"] == 12
    assert all(number == 1 for tokens in document["delivered_tokens"] for number in tokens)
    assert max(max(each.tokens.token_ids) for each in measured) < 5000


async def test_a_stall_is_in_the_latency_of_all_who_were_due_meanwhile(options: Make) -> None:
    """The server answers nobody until it has seen one request, and then for a while no more.

    With one place in flight, a generator that counted from the sending would show one slow request and the rest fast.
    """
    stall_s = 0.4
    gateway = StandInGateway()
    gateway.gate.clear()
    async with serving(gateway) as address:
        asked = options(address, points=(Point(rate=1000.0),), max_in_flight=1, process=Process.CONSTANT)
        running = asyncio.create_task(run(asked))
        await gateway.until_arrived(1)
        await asyncio.sleep(stall_s)  # the stall itself, not a wait for a condition
        gateway.gate.set()
        _, (document,) = await running
    assert document["completed"] == 12
    last_due_s = 11 / 1000
    for q in ("p50", "p90", "p99"):
        assert document[f"{q}_ttft_ms"] >= (stall_s - last_due_s) * 1e3
    assert document["p50_send_lag_ms"] >= (stall_s - last_due_s) * 1e3


async def test_refused_and_failed_requests_are_counted_by_reason(options: Make) -> None:
    gateway = StandInGateway()
    gateway.errors = {2: REFUSED, 5: REFUSED, 7: LOST}
    async with serving(gateway) as address:
        _, (document,) = await run(options(address))
    assert (document["completed"], document["failed"], document["refused"]) == (9, 3, 2)
    assert document["failures"] == {"RESOURCE_EXHAUSTED/QUEUE_FULL": 2, "UNAVAILABLE/WORKER_LOST": 1}
    assert document["rejection_rate"] == pytest.approx(2 / 12, abs=1e-5)
    assert document["slo_attainment"] == pytest.approx(9 / 12)
    assert sum(group["failed"] for group in document["by_tenant"].values()) == 3


async def test_ctrl_c_writes_what_was_measured(options: Make) -> None:
    gateway = StandInGateway()
    gateway.errors = {1: REFUSED}
    gateway.held_from = 4
    async with serving(gateway) as address:
        asked = options(address, points=(Point(concurrency=2), Point(concurrency=4)))
        running = asyncio.create_task(run(asked))
        await gateway.until_arrived(6)
        os.kill(os.getpid(), signal.SIGINT)
        is_whole, documents = await running
        await gateway.is_idle.wait()  # a stop cancels the calls that were under way
    assert not is_whole
    assert len(documents) == 1
    document = documents[0]
    assert not document["is_whole"]
    assert document["num_planned"] == 12
    assert (document["completed"], document["failed"], document["interrupted"]) == (3, 1, 2)
    assert document["num_prompts"] == 6
    assert document["failures"] == {"RESOURCE_EXHAUSTED/QUEUE_FULL": 1}


async def test_a_sweep_of_users_measures_each_number(options: Make) -> None:
    gateway = StandInGateway()
    async with serving(gateway) as address:
        points = tuple(Point(concurrency=number) for number in (1, 3))
        _, documents = await run(options(address, points=points, workload="decode"))
    assert [document["max_concurrency"] for document in documents] == [1, 3]
    assert [document["max_concurrent_requests"] for document in documents] == [1, 3]
    assert documents[0]["input_lens"] == documents[1]["input_lens"]
    prompts = [tuple(each.tokens.token_ids) for each in gateway.requests]
    assert len(set(prompts[:12]) & set(prompts[12:])) == 0


async def test_capacity_is_searched_with_the_rule(options: Make) -> None:
    """Every request of the third rate fails, so the second is the capacity."""
    gateway = StandInGateway()
    gateway.errors = dict.fromkeys(range(24, 10000), LOST)
    async with serving(gateway) as address:
        search = CapacitySearch(100.0, max_points=3)
        asked = options(address, points=(Point(rate=100.0),), search=search, rule=GoodputRule(ttft_ms=60_000))
        _, documents = await run(asked)
    assert [document["request_rate"] for document in documents] == [100.0, 200.0, 400.0]
    sweep = json.loads((asked.output / "sweep.json").read_text())
    assert sweep["capacity"]["request_rate"] == 200.0
    assert sweep["goodput_rule"] == {"ttft_ms": 60_000}


async def test_a_trace_is_replayed_and_described(options: Make, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "\n".join(f"{index / 100},c{index % 2},{20 + index},{index % 3}" for index in range(6))
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + rows)
    gateway = StandInGateway()
    async with serving(gateway) as address:
        trace = load_trace(path, first_row=1, end_row=6)
        asked = options(
            address,
            workload=trace,
            points=(Point(),),
            process=Process.TRACE,
            time_scale=2.0,
            scale=1.0,
            num_requests=None,
        )
        _, (document,) = await run(asked)
    assert document["request_rate"] == "inf"
    assert document["workload"]["trace"]["rows_taken"] == 5
    assert document["workload"]["trace"]["rows_without_tokens"] == 1
    assert document["scheduled"] == pytest.approx([0.0, 0.02, 0.06, 0.08])
    assert document["input_lens"] == [21, 22, 24, 25]
    assert document["tenant_ids"] == ["acme", "bulk", "bulk", "acme"]


async def test_the_page_is_written_when_all_was_measured(
    options: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- begin load -->\nNot measured yet.\n<!-- end load -->\nafter\n")
    async with serving(StandInGateway()) as address:
        await run(options(address, command="python -m bench load mixed --page"))
    text = page.read_text()
    assert "`python -m bench load mixed --page`" in text
    assert "Not measured yet" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


async def test_the_pictures_of_a_real_run(options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    monkeypatch.setattr("bench.load.plots.DPI", 30)
    async with serving(StandInGateway()) as address:
        asked = options(address, has_pictures=True)
        await run(asked)
    assert "data:image/png;base64," in (asked.output / "report.html").read_text(encoding="utf-8")
