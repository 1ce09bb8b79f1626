"""Configuration is frozen, documented and read once: environment variables and command-line flags, checked at start."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What every program can be told. Subclasses set their own environment prefix.

    Precedence: command-line flags, then environment variables, then defaults. A bad value or unknown flag stops the
    start.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore", cli_kebab_case=True, cli_implicit_flags=True)

    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 picks a free one")
    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus HTTP endpoint; empty turns it off"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="least level that is logged")
    log_format: str = Field(
        "auto", pattern="^(auto|json|console)$", description="auto: console on a terminal, else JSON"
    )
    fleet_key: str = Field(
        "",
        description="secret shared by gateways and workers; empty refuses announcements, and sessions from other hosts",
        validation_alias="TIDEGATE_FLEET_KEY",
    )
    tls_cert: str = Field("", description="PEM file of the server's certificate chain; empty: plain text")
    tls_key: str = Field("", description="PEM file of its private key, without a password")
    tls_client_ca: str = Field(
        "", description="PEM file of the authorities whose certificates callers must show; empty: none is asked for"
    )
    fleet_tls_ca: str = Field(
        "",
        description="PEM file of the authorities of the servers that are dialled (a gateway dials workers, a worker "
        "gateways); empty: they are dialled in plain text",
    )
    fleet_tls_cert: str = Field("", description="PEM file of the certificate chain shown to them; empty: none")
    fleet_tls_key: str = Field("", description="PEM file of its private key, without a password")
    fleet_tls_name: str = Field(
        "", description="name that their certificates carry, whatever address they are dialled at; empty: its host"
    )
    max_receive_message_bytes: int = Field(
        4 << 20,
        ge=1024,
        description="largest message taken; a larger one is refused, one of more than twice the size unread",
    )
    max_send_message_bytes: int = Field(4 << 20, ge=1024, description="largest message sent")
    drain_s: float = Field(30.0, ge=0, description="seconds that running requests get to finish after SIGTERM")
