"""`python -m gateway`: one gateway, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp

from common.local_redis import LocalRedisError, redis_url
from common.log import setup_logging
from gateway.app import GatewayApp
from gateway.config import GatewaySettings
from gateway.tenants import TenantsFileError, load_tenants
from gateway.tenants_watch import TenantsWatch

_log = structlog.get_logger(__name__)


async def serve(settings: GatewaySettings, url: str) -> None:
    """Runs a gateway on the store at `url` until a signal; a second one ends the drain at once."""
    tenants = load_tenants(settings.tenants_file)
    app = GatewayApp(settings, tenants, url)
    watching = asyncio.create_task(TenantsWatch(settings.tenants_file, tenants).run())
    stopping = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await app.start()
    asked = asyncio.create_task(app.drain_wanted.wait())
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait([asked, signalled], return_when=asyncio.FIRST_COMPLETED)
    stopping.set()
    for waiting in (asked, signalled):
        waiting.cancel()
    _log.info("gateway_draining", drain_s=settings.drain_s)
    watching.cancel()
    draining = asyncio.create_task(app.stop())
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        app.end_drain()
    await draining


def _run(program: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        asyncio.run(program)
    else:
        uvloop.run(program)


def main() -> None:
    """Exits with 1 and one line of explanation if the settings, the files, the ports or the store are at fault."""
    try:
        settings = CliApp.run(GatewaySettings)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}, not {fault['input']!r}" for fault in error.errors())
        sys.exit(f"gateway: {faults}")
    setup_logging(settings.log_level, settings.log_format, program="gateway")
    try:
        with redis_url(settings.redis_url or None) as url:
            _run(serve(settings, url))
    except (TenantsFileError, LocalRedisError, OSError) as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()
