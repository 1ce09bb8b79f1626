from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.types import BlockUsage, ClaimRef, ModelLimits
from gateway.reports import PendingReports

LIMITS = ModelLimits("m", 100, 100, 16, 10, 4)


def usage(seq: int, *accounted: str) -> BlockUsage:
    return BlockUsage(seq, 1, 2, 3, 0, 1, 0, 3, tuple(ClaimRef(name, 1) for name in accounted))


def names(reports: PendingReports) -> list[list[str]]:
    return [[ref.request_id for ref in report.usage.accounted] for report in reports.take()]


def test_the_latest_numbers_keep_the_claims_of_earlier_ones() -> None:
    reports = PendingReports()
    reports.add("w", 1, LIMITS, usage(1, "a"))
    reports.add("w", 1, LIMITS, usage(2, "b", "a"))
    reports.add("w", 1, LIMITS, usage(3))
    [report] = reports.take()
    assert (report.usage.seq, [ref.request_id for ref in report.usage.accounted]) == (3, ["a", "b"])
    assert len(reports) == 0


def test_a_failed_run_gives_its_reports_back_under_the_newer_ones() -> None:
    reports = PendingReports()
    reports.add("w", 1, LIMITS, usage(1, "a"))
    taken = reports.take()
    reports.add("w", 1, LIMITS, usage(2, "b"))
    reports.give_back(taken)
    [report] = reports.take()
    assert (report.usage.seq, [ref.request_id for ref in report.usage.accounted]) == (2, ["a", "b"])


def test_another_start_of_the_worker_drops_the_claims_of_the_former() -> None:
    reports = PendingReports()
    reports.add("w", 2, LIMITS, usage(1, "new"))
    reports.add("w", 1, LIMITS, usage(9, "old"))
    assert names(reports) == [["new"]]
    reports.add("w", 1, LIMITS, usage(9, "old"))
    reports.add("w", 2, LIMITS, usage(1, "new"))
    assert names(reports) == [["new"]]


def test_a_start_that_is_over_is_forgotten_and_a_later_one_is_not() -> None:
    reports = PendingReports()
    reports.add("w", 2, LIMITS, usage(1))
    reports.forget("w", 1)
    assert len(reports) == 1
    reports.forget("w", 2)
    assert len(reports) == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.lists(st.sampled_from("abcdef"), max_size=3), st.booleans())))
def test_no_accounted_claim_is_ever_lost(steps: list[tuple[int, list[str], bool]]) -> None:
    reports = PendingReports()
    delivered: set[str] = set()
    told: set[str] = set()
    for seq, accounted, runs in steps:
        told.update(accounted)
        reports.add("w", 1, LIMITS, usage(seq, *accounted))
        taken = reports.take()
        if runs:
            delivered.update(ref.request_id for report in taken for ref in report.usage.accounted)
        else:
            reports.give_back(taken)
    delivered.update(name for group in names(reports) for name in group)
    assert delivered == told
