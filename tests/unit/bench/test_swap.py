"""The benchmark of swapping: its requests, its figures, and what they are made of."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from bench.swap import LONG, Pair, Run, crowd, decision, figures, is_long, quantile, recomputed_share, serve, table
from bench.workload import Work
from tests.unit.worker.engine.rig import EngineRig


def test_the_same_seed_makes_the_same_short_and_long_requests() -> None:
    work = crowd(50)
    assert work == crowd(50) != crowd(50, seed=1)
    assert {is_long(each) for each in work} == {False, True}
    assert all(len(each.prompt) >= LONG.prompt[0] for each in work if is_long(each))


def test_users_send_their_next_request_when_the_last_has_ended_and_all_tokens_are_counted() -> None:
    rig = EngineRig(num_blocks=30, max_num_seqs=2, host_slots=64, long_after_steps=4, first_chunk_s=0.0)
    work = [Work((index,) * 12, 4 + 9 * (index % 2)) for index in range(10)]
    run = serve(rig.engine, work, num_users=4)
    assert run.num_output == sum(each.num_output for each in work)
    assert run.end_s.keys() == run.first_s.keys() == {f"r{index}" for index in range(10)}
    assert all(0 < run.first_s[name] <= run.end_s[name] <= run.seconds for name in run.end_s)
    assert run.num_preemptions > 0
    assert run.num_computed >= run.num_recomputed + sum(len(each.prompt) + each.num_output - 1 for each in work)


def test_a_failed_request_is_no_measurement() -> None:
    rig = EngineRig(num_blocks=8)
    rig.executor.execute = lambda batch: [None] * len(batch.rows)  # type: ignore[method-assign]
    with pytest.raises(Exception, match="executor returned"):
        serve(rig.engine, [Work((1,) * 4, 2)], num_users=1)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_quantiles_are_values_that_were_measured(share: float) -> None:
    values = [float(index * index % 37) for index in range(101)]
    assert quantile(values, share) == np.quantile(values, share, method="higher")


def test_the_table_shows_both_and_their_ratio() -> None:
    off, on = (
        Pair(
            Run(
                seconds=seconds,
                cpu_s=seconds,
                num_output=100,
                num_computed=1000,
                num_recomputed=recomputed,
                thrash=[0.0, 0.1],
                first_s={"r0": 0.5},
                end_s={"r0": seconds},
            ),
            Run(num_found=50),
            num_asked_again=200,
            copy_s=0.001,
            compute_s=0.008,
        )
        for seconds, recomputed in ((4.0, 200), (2.0, 0))
    )
    assert recomputed_share(off.crowd) == 0.25
    rows = figures([off], [on])
    console = Console(width=120, record=True, quiet=False)
    console.print(table(rows))
    assert ["output tokens/s", "25.0", "50.0", "2.00"] in rows
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert ["P99 of the time to the end, s", "4.00", "2.00", "0.50"] in shown
    assert ["recomputed / useful tokens, %", "25.0", "0.0", "0.00"] in shown
    assert ["asked again: prompt tokens found, %", "25.0", "25.0", "1.00"] in shown
    assert decision([on]).endswith("4x.")
