from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.config import GatewaySettings


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_GATEWAY_QUEUE_TTL_S", "5")
    monkeypatch.setenv("TIDEGATE_REDIS_URL", "redis://somewhere:6379")
    monkeypatch.setenv("TIDEGATE_FLEET_KEY", "secret")
    monkeypatch.setenv("TIDEGATE_GATEWAY_WORKERS", "a:1, b:2,")
    settings = GatewaySettings()
    assert (settings.queue_ttl_s, settings.redis_url, settings.fleet_key) == (5, "redis://somewhere:6379", "secret")
    assert settings.worker_addresses == ("a:1", "b:2")


def test_nothing_needs_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_REDIS_URL", raising=False)
    settings = GatewaySettings()
    assert (settings.redis_url, settings.worker_addresses) == ("", ())
    assert settings.heartbeat_ttl_s > 2 * settings.heartbeat_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", "no-port"),
        ("workers", "a:1;b:2"),
        ("pool", "Default"),
        ("pool", "a}b"),
        ("queue_ttl_s", 0),
        ("max_attempts", 0),
        ("log_level", "loud"),
    ],
)
def test_bad_values_stop_the_start(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        GatewaySettings.model_validate({name: value})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings().queue_ttl_s = 1.0  # type: ignore[misc]
