"""What a tenant may use: the limits of one tenant, and what is left of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated, ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=0, le=10**9, strict=True)]
Size = Annotated[int, Field(ge=1, le=10**9, strict=True)]


def _check_time_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError("must be the name of a time zone, like UTC or Europe/Berlin") from error
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant over all gateways; None is no limit. Counts may be 0, which allows nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    requests_per_minute: Count | None = None  # admitted in any 60 s
    requests_at_once: Count | None = None  # of these, without a pause; then one each 60 s / requests_per_minute
    tokens_per_minute: Count | None = (
        None  # prompt and output, in any 60 s; a running request counts with all it may use
    )
    max_concurrent: Count | None = None  # admitted and not ended, waiting ones included
    tokens_per_day: Count | None = None  # prompt and output, by the calendar day of `time_zone`
    time_zone: Annotated[str, AfterValidator(_check_time_zone)] = "UTC"  # where the day begins
    max_context: Size | None = None  # tokens of prompt and output together of one request
    max_output: Size | None = None  # output tokens of one request
    max_queue_length: Count | None = None  # waiting requests
    max_queue_wait_s: Annotated[float, Field(gt=0, le=86400, strict=True)] | None = (
        None  # seconds a request may wait, if below the gateway's
    )

    def described(self) -> dict[str, str]:
        """Name and value of every limit that is set; the time zone if a limit depends on it."""
        names = [field.name for field in fields(self) if field.name != "time_zone"]
        described = {name: str(value) for name in names if (value := getattr(self, name)) is not None}
        return described if self.tokens_per_day is None else {**described, "time_zone": self.time_zone}

    @property
    def is_unmetered(self) -> bool:
        """Whether nothing of what the tenant uses has to be counted."""
        metered = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent, self.tokens_per_day)
        return all(limit is None for limit in metered)

    @property
    def allowance(self) -> int | None:
        """Requests that may come at once, where that is less than the limit of a minute."""
        if self.requests_per_minute is None or self.requests_at_once is None:
            return None
        return self.requests_at_once if self.requests_at_once < self.requests_per_minute else None

    @property
    def max_request_tokens(self) -> int | None:
        """Tokens of prompt and output together that one request can get at all."""
        bounds = (self.max_context, self.tokens_per_minute, self.tokens_per_day)
        return min((bound for bound in bounds if bound is not None), default=None)

    def day_offset(self, now: datetime) -> timedelta:
        """How far the tenant's day is ahead of UTC. `now` is aware of its time zone."""
        return now.astimezone(ZoneInfo(self.time_zone)).utcoffset() or timedelta()


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a tenant's limits just after a decision; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_today: int | None = None

    def by_name(self) -> dict[str, int]:
        """The limits that the tenant has."""
        numbers = {
            "requests-per-minute": self.requests_per_minute,
            "tokens-per-minute": self.tokens_per_minute,
            "concurrent": self.concurrent,
            "tokens-today": self.tokens_today,
        }
        return {name: number for name, number in numbers.items() if number is not None}
