from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gateway.admission.limits import NO_LIMITS, TenantLimits


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (NO_LIMITS, None),
        (TenantLimits(max_context=100, tokens_per_minute=500), 100),
        (TenantLimits(max_context=1000, tokens_per_minute=500), 500),
        (TenantLimits(tokens_per_day=70, tokens_per_minute=500, max_output=3), 70),
    ],
)
def test_a_request_can_get_what_its_tightest_limit_holds(limits: TenantLimits, most: int | None) -> None:
    assert limits.max_request_tokens == most


@pytest.mark.parametrize(
    ("zone", "month", "hours"),
    [("UTC", 1, 0), ("Europe/Berlin", 1, 1), ("Europe/Berlin", 7, 2), ("America/New_York", 7, -4)],
)
def test_the_day_follows_the_clocks_of_its_zone(zone: str, month: int, hours: float) -> None:
    now = datetime(2027, month, 10, 12, tzinfo=UTC)
    assert TenantLimits(time_zone=zone).day_offset(now) == timedelta(hours=hours)
