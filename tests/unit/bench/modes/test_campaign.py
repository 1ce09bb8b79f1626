"""A whole campaign in simulated time, and what is written of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.load.plots import save
from bench.modes.campaign import OFFERED_LOAD, Campaign, Watcher
from bench.modes.plots import overview
from bench.modes.report import COLUMNS, document, gain_line, markdown, table
from bench.modes.summary import WorkloadFigures, summarize
from bench.modes.trial import Setting, Trial
from bench.modes.workloads import Workload, mix
from tests.unit.bench.modes.made import LIMITS, VOCAB_SIZE, machine
from worker.engine.modes import MODES


@pytest.fixture(scope="module")
def made() -> Workload:
    return mix("30 % long", 24, seed=0, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def campaign(made: Workload) -> Campaign:
    campaign = Campaign(machine, LIMITS, tuple(MODES), (4, 8))
    campaign.run(made)
    return campaign


@pytest.fixture(scope="module")
def figures(made: Workload, campaign: Campaign) -> WorkloadFigures:
    return summarize(made, campaign.trials, campaign.modes)


def test_every_mode_is_tried_at_every_size_and_then_offered_the_same_rate(
    made: Workload, campaign: Campaign, figures: WorkloadFigures
) -> None:
    assert len(campaign.trials) == campaign.trials_per_workload == 15
    offered = [trial for trial in campaign.trials if trial.rate is not None]
    assert {trial.setting.mode for trial in offered} == set(MODES)
    fastest = max(each.best.output_rate for each in figures.modes)
    rate = OFFERED_LOAD * fastest / (made.num_output / 24)
    assert [trial.rate for trial in offered] == [pytest.approx(rate)] * len(offered)
    assert all(trial.num_output == made.num_output for trial in campaign.trials)
    for each in figures.modes:
        assert each.offered is not None
        assert each.offered.setting == each.best.setting


def test_continuous_gains_and_stays_below_the_ceiling(figures: WorkloadFigures) -> None:
    gain = figures.gain()
    assert gain is not None
    _size, ratio, ceiling = gain
    assert 1 < ratio < ceiling
    rates = {each.mode: each.best.output_rate for each in figures.modes}
    assert rates["static"] < rates["continuous"] <= rates["paged"]
    done = {each.mode: each.num_long_done for each in figures.modes}
    assert done["static"] < max(done.values()) == figures.workload.num_long


def test_the_table_fits_a_narrow_terminal_and_the_page_has_all_modes(figures: WorkloadFigures) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(figures))
    text = console.export_text()
    assert "…" not in text
    assert all(mode in text for mode in MODES)
    page = markdown([figures], ["a machine"])
    assert page.count("\n| ") == len(MODES) + 2, "header, rule and modes"
    assert all(column in page for column in COLUMNS)
    assert gain_line(figures)[1:] in page


def test_the_document_says_what_was_measured(figures: WorkloadFigures) -> None:
    written = json.loads(json.dumps(document([figures], {"seed": 0}, is_whole=True), allow_nan=False))
    [workload] = written["workloads"]
    assert written["seed"] == 0
    assert len(workload["output_lens"]) == workload["requests"] == 24
    assert [mode["mode"] for mode in workload["modes"]] == list(MODES)
    static = workload["modes"][0]
    assert [trial["max_num_seqs"] for trial in static["saturated"]] == [4, 8]
    assert static["offered"]["completed"] == 24
    assert static["offered"]["p99_ttft_ms"] >= static["offered"]["p50_ttft_ms"] > 0


def test_the_picture_is_drawn_also_of_what_an_interrupted_run_left(
    figures: WorkloadFigures, made: Workload, campaign: Campaign, tmp_path: Path
) -> None:
    part = summarize(made, campaign.trials[:3], campaign.modes)
    path = save(overview([figures, part]), tmp_path / "modes.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "-" in next(iter(table(part).columns[3].cells)), "latencies were not measured"


class Interrupting(Watcher):
    """Presses Ctrl-C in the third trial."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, workload: Workload, setting: Setting, rate: float | None) -> None:
        self.num_begun += 1

    def advance(self, num_ended: int) -> None:
        if self.num_begun == 3:
            raise KeyboardInterrupt

    def end(self, trial: Trial) -> None:
        assert trial.seconds > 0


def test_an_interrupted_campaign_keeps_the_trials_that_were_over(made: Workload) -> None:
    campaign = Campaign(machine, LIMITS, tuple(MODES), (4, 8), Interrupting())
    with pytest.raises(KeyboardInterrupt):
        campaign.run(made)
    assert [str(trial.setting) for trial in campaign.trials] == ["static, 4 slots", "static, 8 slots"]
