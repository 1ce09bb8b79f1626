"""The gateway as a program: from its settings to its end by a signal."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import structlog

from common import event_loop
from common.log import setup_logging
from gateway.app import GatewayApp
from gateway.config import GatewaySettings
from gateway.processes import parent_sentinel
from gateway.tenants import TenantsFileError, load_tenants
from gateway.tenants_watch import TenantsWatch

_log = structlog.get_logger(__name__)

# Of which the collector looks at so many at a time: about a millisecond's work, beside streams that it holds up.
_YOUNG_OBJECTS = 2_000
_LOOKS_PER_LONGER_ONE = 100  # which takes tens of milliseconds under load, and finds next to nothing


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
    parent = parent_sentinel()
    if parent is not None:

        def on_orphaned(parent: int = parent) -> None:
            loop.remove_reader(parent)
            on_signal()

        loop.add_reader(parent, on_orphaned)
    await app.start()
    _spare_collector()
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


def _spare_collector() -> None:
    """Takes what lives as long as the program out of the garbage collector's sight, and lets it look less often.

    Requests leave few cycles behind, yet under load a tenth of the time went into looking for them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _LOOKS_PER_LONGER_ONE)


def run_one_of_several(settings: GatewaySettings, url: str) -> None:
    """One gateway in a process of several, until a signal."""
    setup_logging(settings.log_level, settings.log_format, program="gateway")
    run(settings, url)


def run(settings: GatewaySettings, url: str) -> None:
    """One gateway until a signal. Exits with 1 and one line of explanation if files, ports or store are at fault."""
    try:
        event_loop.run(serve(settings, url))
    except (TenantsFileError, OSError) as error:
        sys.exit(f"gateway: {error}")
