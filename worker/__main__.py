"""`python -m worker`: runs a worker until SIGTERM or SIGINT, which drain it."""

from __future__ import annotations

import asyncio
import signal
import sys

from pydantic_settings import CliApp

from common.default_model import DefaultModelError
from common.log import setup_logging
from worker.app import Worker
from worker.config import WorkerSettings
from worker.model.loaded_model import ModelLoadError


async def _run(settings: WorkerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Worker(settings).run(stop)


def main() -> None:
    """Exits with 1 and one line of explanation if the settings, the ports or the model are at fault."""
    settings = CliApp.run(WorkerSettings)
    setup_logging(settings.log_level, settings.log_format, program="worker")
    try:
        asyncio.run(_run(settings))
    except (DefaultModelError, ModelLoadError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"worker: {error}")


if __name__ == "__main__":
    main()
